"""Block-sparse attention on CUDA over compressed block layouts, in Triton: the host side.

triton_kernels.py has the kernels. One program sums each gradient in one order, without atomics, so
every run gives the same bits. In the list of a row or column at most two blocks need a mask: the
causal diagonal and the short last block. Long rows and columns start first.

Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim.

Needs triton: import it where it is used. Under TRITON_INTERPRET=1, set before triton is imported,
the same kernels run on CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.errors import OutOfResources

from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.kernels import triton_kernels
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.meta_mode import device_kind, is_meta
from longseq_bench.patterns.block_layout import BlockLayout, Ints, common_sizes

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS = (16, 32, 64, 128, 256)
MAX_PROGRAMS = 2**31 - 1


def unavailable_reason(block: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return the reason why these kernels don't support a workload; None if they do."""
    if block not in BLOCKS:
        return f"Triton's tiles need a block of 16, 32, 64, 128 or 256 tokens, not {block}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"Triton's tiles need a head_dim of 16 to 256 in steps of 16, not {head_dim}"
    if dtype not in DTYPES:
        return f"the Triton kernels support float16, bfloat16, float32, not {str(dtype)[6:]}"
    return None


@dataclass(frozen=True)
class Shape:
    """The tile of a kernel: queries by keys, its warps, and its pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    def smaller(self) -> Shape | None:
        """Return the next tile that takes less shared memory, or None."""
        # with one stage no load overlaps computation, so the second stage is removed last
        if self.stages > 2 or (self.stages == 2 and max(self.queries, self.keys) == 16):
            return replace(self, stages=self.stages - 1)
        if max(self.queries, self.keys) == 16:
            return None
        if self.queries >= self.keys:
            return replace(self, queries=self.queries // 2)
        return replace(self, keys=self.keys // 2)


_MAX_HEAD_DIMS = (64, 128, 256)
_SHAPES = {
    ("forward", 2): (Shape(128, 128, 8, 3), Shape(128, 64, 8, 3), Shape(64, 64, 8, 2)),
    ("forward", 4): (Shape(32, 32, 4, 2), Shape(32, 32, 8, 2), Shape(16, 32, 4, 2)),
    ("dq", 2): (Shape(128, 64, 8, 3), Shape(128, 64, 8, 3), Shape(64, 32, 8, 2)),
    ("dq", 4): (Shape(32, 32, 4, 2), Shape(32, 32, 4, 2), Shape(16, 16, 4, 2)),
    ("dkv", 2): (Shape(64, 128, 8, 3), Shape(64, 128, 8, 2), Shape(32, 64, 8, 2)),
    ("dkv", 4): (Shape(32, 32, 8, 2), Shape(32, 32, 8, 2), Shape(16, 16, 4, 2)),
}
"""Tiles by kernel and bytes per element, for a head_dim up to each of _MAX_HEAD_DIMS.

Compiled for compute capabilities 8.0 and 9.0, the 16-bit ones fit the shared memory and spill few
registers.
"""

_KERNELS = {
    "forward": triton_kernels.forward,
    "dq": triton_kernels.backward_queries,
    "dkv": triton_kernels.backward_keys,
}


def select_shape(kernel: str, block: int, head_dim: int, dtype: torch.dtype) -> Shape:
    """Return the first tile to try for `kernel` (forward, dq, dkv), never larger than a block."""
    shapes = _SHAPES.get((kernel, dtype.itemsize), ())
    for max_head_dim, shape in zip(_MAX_HEAD_DIMS, shapes, strict=False):
        if head_dim <= max_head_dim:
            queries, keys = min(shape.queries, block), min(shape.keys, block)
            is_full = (queries, keys) == (shape.queries, shape.keys)
            # dK and dV of 64 keys by 128 take half the registers of 8 warps, all of 4
            is_large = is_full or (kernel == "dkv" and keys * head_dim > 64 * 64)
            return Shape(queries, keys, shape.warps if is_large else 4, shape.stages)
    raise UnsupportedError(unavailable_reason(block, head_dim, dtype) or f"no tile for {kernel}")


class TritonBlocks:
    """An AttentionKernel over one layout, or over one layout per query head.

    q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq, any strides between batches, heads and
    tokens (tensors with a strided D are copied). Out and gradients are contiguous; the log-sum-exp
    is natural, float32.

    Raises UnsupportedError with the reason for a block, head_dim, dtype, device or shape that the
    kernels don't support, KernelLimitError for a launch that is too large.
    """

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        self.layouts = tuple(layouts)
        self.seq_len, self.block, self.causal = common_sizes(layouts)
        if self.block not in BLOCKS:
            raise UnsupportedError(str(unavailable_reason(self.block, 16, torch.float32)))
        self._rows: dict[torch.device, Triple] = {}
        self._columns: dict[torch.device, Triple] = {}
        self._shapes: dict[tuple[str, int, torch.dtype], Shape] = {}

    def prepare(self, device: torch.device | str, train: bool = False) -> None:
        """Copy the lists of rows to a device, once; with `train` also those of columns."""
        device = torch.empty(0, device=device).device
        if device not in self._rows:
            rows = [(layout.indptr, layout.indices) for layout in self.layouts]
            self._rows[device] = _build_lists(rows, device)
        if train and device not in self._columns:
            columns = [layout.transpose() for layout in self.layouts]
            self._columns[device] = _build_lists(columns, device, shared_order=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
        self._check(q, k, v)
        self.prepare(q.device)
        lists, (q, k, v) = self._rows[q.device], map(_with_dense_rows, (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3] if keep_lse else (1,), dtype=torch.float32, device=q.device)

        self._launch("forward", (q, k, v, out, lse), lists, KEEP_LSE=keep_lse)
        return out, lse if keep_lse else None

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k, v.

        out and lse may belong to a softmax over more keys than these. The gradients of rows with an
        lse of -inf are zeros.
        """
        (grad_out, q, out, lse), (k, v) = queries, keys
        self._check(q, k, v)
        self.prepare(q.device, train=True)
        rows, columns = self._rows[q.device], self._columns[q.device]
        grad_out, q, k, v, out = map(_with_dense_rows, (grad_out, q, k, v, out))
        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        # dq writes the delta that dkv reads
        self._launch("dq", (q, k, v, out, grad_out, lse, delta, dq), rows)
        self._launch("dkv", (q, k, v, grad_out, lse, delta, dk, dv), columns)
        return dq, dk, dv

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if reason := unavailable_reason(self.block, q.shape[-1], q.dtype):
            raise UnsupportedError(reason)
        batch, heads, tokens, dim = q.shape
        if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (batch, tokens, dim):
            raise UnsupportedError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: "
                "k and v need the same shape, and q may differ in heads only"
            )
        if tokens != self.seq_len:
            raise UnsupportedError(f"q has {tokens} tokens, but the layout has {self.seq_len}")
        if heads % k.shape[1]:
            raise UnsupportedError(f"{k.shape[1]} key heads don't divide {heads} query heads")
        if len(self.layouts) not in (1, heads):
            raise UnsupportedError(f"{len(self.layouts)} layouts for {heads} query heads")
        if {k.dtype, v.dtype} != {q.dtype}:
            raise UnsupportedError("q, k and v need the same dtype")
        if device_kind(q) != "cuda" and not triton.knobs.runtime.interpret:
            raise UnsupportedError(f"the Triton kernels need a CUDA device, not {q.device.type}")

    def _constants(self, q: Tensor, k: Tensor, tile: Shape) -> dict[str, Any]:
        return {
            "GROUP": q.shape[1] // k.shape[1],
            "SHARED": len(self.layouts) == 1,
            "BLOCK": self.block,
            "DIM": q.shape[3],
            "WIDE": triton.next_power_of_2(q.shape[3]),
            "CAUSAL": self.causal,
            "TAIL": self.seq_len % self.block != 0,
            "M": tile.queries,
            "N": tile.keys,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def _grid(self, owner: Tensor, tokens: int) -> tuple[int]:
        """Return a grid of one program per `tokens` tokens of each head and batch of `owner`."""
        parts = self.block // tokens
        programs = self.layouts[0].rows * parts * owner.shape[0] * owner.shape[1]
        if programs > MAX_PROGRAMS:
            raise KernelLimitError(
                f"{programs} programs of {tokens} tokens are more than the maximum of one "
                f"launch, {MAX_PROGRAMS}"
            )
        return (programs,)

    def _launch(
        self, name: str, tensors: Sequence[Tensor], lists: Triple, **constants: Any
    ) -> None:
        """Run a kernel with the largest tile that fits the device's shared memory.

        tensors: q, k and others in the order of the kernel's parameters.
        """
        if is_meta():
            return
        q, k, *_ = tensors
        kernel = _KERNELS[name]
        strides = [t.stride()[:3] for t in tensors if t.dim() == 4]
        sizes = (q.shape[2], self.layouts[0].rows, q.shape[1], q.shape[3] ** -0.5)

        def run(tile: Shape) -> None:
            grid = self._grid(k, tile.keys) if name == "dkv" else self._grid(q, tile.queries)
            fixed = self._constants(q, k, tile) | constants
            kernel[grid](*tensors, *lists, *strides, *sizes, **fixed)

        key = (name, q.shape[3], q.dtype)
        tile = self._shapes.get(key) or select_shape(name, self.block, q.shape[3], q.dtype)
        on_device = torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()
        with on_device:
            self._shapes[key] = run_fitting(tile, run)


def run_fitting(tile: Shape, run: Callable[[Shape], None]) -> Shape:
    """Run with `tile`, or with the next smaller one that fits the device; return the tile.

    Raises KernelLimitError if the smallest tile does not fit.
    """
    while True:
        try:
            run(tile)
        except OutOfResources as error:
            if (smaller := tile.smaller()) is None:
                reason = f"no tile is small enough for this device: {error}"
                raise KernelLimitError(reason) from error
            tile = smaller
        else:
            return tile


def _build_lists(
    lists: Sequence[tuple[Ints, NDArray[np.int32]]],
    device: torch.device,
    shared_order: bool = False,
) -> Triple:
    """Return indptr, indices and order of compressed rows (or columns), layout after layout.

    indptr (layouts, rows + 1) int64, offsets into indices int32; order (layouts, rows) int32, the
    longest row first; with shared_order (1, rows) for all layouts, by the sum of their lengths.
    """
    starts = np.cumsum([0] + [len(indices) for _, indices in lists[:-1]])
    indptr = np.stack([own + start for (own, _), start in zip(lists, starts, strict=True)])
    lengths = np.diff(indptr)
    lengths = lengths.sum(0, keepdims=True) if shared_order else lengths
    # a stable sort keeps equal rows in sequence, so that neighbouring programs share keys
    order = np.argsort(-lengths, axis=1, kind="stable")
    indices = np.concatenate([indices for _, indices in lists])
    arrays = (indptr.astype(np.int64), indices, order.astype(np.int32))
    on_device = [torch.from_numpy(array).to(device) for array in arrays]
    return on_device[0], on_device[1], on_device[2]


def _with_dense_rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()
