"""Block-sparse attention on CUDA over compressed block layouts, in Triton.

FlashAttention-2 (arXiv 2307.08691): online softmax forward; backward from the output and the
log-sum-exp, one kernel for dQ over the rows of the layout, one for dK and dV over its columns. Each
gradient is summed by one program in one order: no atomics, the same bits at every run. A row or a
column lists blocks that are seen whole, which run without a mask, and at most two that are not: the
causal diagonal and the short last block. Long rows and columns start first.

Letters: B batch, Hq and Hk query and key heads, D head_dim, N tokens of the sequence; in kernels M
and N are the queries and keys of one tile, WIDE is D rounded up to a power of two. Offsets are 64
bits wide: tokens times stride outgrow 32 at tens of millions of tokens.

Needs triton: import it where it is used. Under TRITON_INTERPRET=1, set before triton is imported,
the same kernels run on CPU tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language import tensor
from triton.runtime.errors import OutOfResources

from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.meta_mode import device_kind, is_meta
from longseq_bench.patterns.block_layout import BlockLayout, Ints

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS = (16, 32, 64, 128, 256)
MOST_PROGRAMS = 2**31 - 1

_LOG2_E = tl.constexpr(1 / math.log(2))
_LOG_2 = tl.constexpr(math.log(2))


def unavailable_reason(block: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels can't do such a workload, as one sentence, or None."""
    if block not in BLOCKS:
        return f"Triton's tiles need a block of 16, 32, 64, 128 or 256 tokens, not {block}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"Triton's tiles need a head_dim of 16 to 256 in steps of 16, not {head_dim}"
    if dtype not in DTYPES:
        return f"the Triton kernels take float16, bfloat16 or float32, not {_name(dtype)}"
    return None


@dataclass(frozen=True)
class Shape:
    """The tile of a kernel: queries by keys, warps that share it, loads kept in flight."""

    queries: int
    keys: int
    warps: int
    stages: int

    def smaller(self) -> Shape | None:
        """The next that takes less shared memory; None where there is no smaller one."""
        # without a second stage nothing is loaded while the last is computed: given up last
        if self.stages > 2 or (self.stages == 2 and max(self.queries, self.keys) == 16):
            return replace(self, stages=self.stages - 1)
        if max(self.queries, self.keys) == 16:
            return None
        if self.queries >= self.keys:
            return replace(self, queries=self.queries // 2)
        return replace(self, keys=self.keys // 2)


_SHAPES: dict[str, tuple[tuple[int, int, Shape], ...]] = {
    "forward": (
        (2, 64, Shape(128, 128, 8, 3)),
        (2, 128, Shape(128, 64, 8, 3)),
        (2, 256, Shape(64, 64, 8, 2)),
        (4, 64, Shape(32, 32, 4, 2)),
        (4, 128, Shape(32, 32, 8, 2)),
        (4, 256, Shape(16, 32, 4, 2)),
    ),
    "dq": (
        (2, 64, Shape(128, 64, 8, 3)),
        (2, 128, Shape(128, 64, 8, 3)),
        (2, 256, Shape(64, 32, 8, 2)),
        (4, 64, Shape(32, 32, 4, 2)),
        (4, 128, Shape(32, 32, 4, 2)),
        (4, 256, Shape(16, 16, 4, 2)),
    ),
    "dkv": (
        (2, 64, Shape(64, 128, 8, 3)),
        (2, 128, Shape(64, 128, 8, 2)),
        (2, 256, Shape(32, 64, 8, 2)),
        (4, 64, Shape(32, 32, 8, 2)),
        (4, 128, Shape(32, 32, 8, 2)),
        (4, 256, Shape(16, 16, 4, 2)),
    ),
}
"""By kernel: bytes a number, the widest head, the tile. Compiled for compute capabilities 8.0 and
9.0, the 16-bit ones fit the shared memory and spill no more than a few registers."""


def shape(kernel: str, block: int, head_dim: int, dtype: torch.dtype) -> Shape:
    """The tile that `kernel` (forward, dq, dkv) starts with; never larger than a block."""
    for size, widest, found in _SHAPES[kernel]:
        if size == dtype.itemsize and head_dim <= widest:
            queries, keys = min(found.queries, block), min(found.keys, block)
            whole = (queries, keys) == (found.queries, found.keys)
            # dK and dV of 64 keys by 128 take half the registers of 8 warps, all of 4
            many = whole or (kernel == "dkv" and keys * head_dim > 64 * 64)
            return Shape(queries, keys, found.warps if many else 4, found.stages)
    raise UnsupportedError(unavailable_reason(block, head_dim, dtype) or f"no tile for {kernel}")


class TritonBlocks:
    """Attention over one layout, or over one a query head: an AttentionKernel.

    q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq, any strides between batches, heads and
    tokens (D is copied where it is strided); out and gradients are contiguous, the log-sum-exp is
    natural, float32. Raises UnsupportedError with the reason where block, head_dim, dtype, device
    or shapes don't suit, KernelLimitError where the launch would be too large.
    """

    def __init__(self, layouts: BlockLayout | Sequence[BlockLayout]) -> None:
        self.layouts = (layouts,) if isinstance(layouts, BlockLayout) else tuple(layouts)
        alike = {(one.seq_len, one.block, one.causal) for one in self.layouts}
        if len(alike) != 1:
            raise UnsupportedError(
                "the Triton kernels need one layout, or one a query head of the same tokens, block "
                "and causality"
            )
        self.seq_len, self.block, self.causal = alike.pop()
        if self.block not in BLOCKS:
            raise UnsupportedError(str(unavailable_reason(self.block, 16, torch.float32)))
        self._rows: dict[torch.device, _Lists] = {}
        self._columns: dict[torch.device, _Lists] = {}
        self._shapes: dict[tuple[str, int, torch.dtype], Shape] = {}

    def prepare(self, device: torch.device | str, train: bool = False) -> None:
        """Puts the lists on a device, once; those of the columns where `train`."""
        device = torch.empty(0, device=device).device
        if device not in self._rows:
            rows = [(one.indptr, one.indices) for one in self.layouts]
            self._rows[device] = _lists(rows, device)
        if train and device not in self._columns:
            columns = [one.transpose() for one in self.layouts]
            self._columns[device] = _lists(columns, device, together=True)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, Hq, N, D) and, where kept, the log-sum-exp (B, Hq, N)."""
        self._check(q, k, v)
        self.prepare(q.device)
        lists, (q, k, v) = self._rows[q.device], map(_dense_rows, (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3] if keep_lse else (1,), dtype=torch.float32, device=q.device)

        def run(tile: Shape) -> None:
            grid = self._grid(q, tile.queries)
            _forward[grid](
                q, k, v, out, lse, *lists.tensors,
                q.stride()[:3], k.stride()[:3], v.stride()[:3], out.stride()[:3],
                q.shape[2], lists.rows, q.shape[1], q.shape[3] ** -0.5,
                **self._constants(q, k, tile), KEEP_LSE=keep_lse,
            )  # fmt: skip

        self._launch("forward", q, run)
        return out, lse if keep_lse else None

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v; `out` and `lse` may be those of a larger softmax of which these
        keys are a part. Rows whose lse is -inf have none."""
        self._check(q, k, v)
        self.prepare(q.device, train=True)
        rows, columns = self._rows[q.device], self._columns[q.device]
        grad_out, q, k, v, out = map(_dense_rows, (grad_out, q, k, v, out))
        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        common = (q.shape[2], rows.rows, q.shape[1], q.shape[3] ** -0.5)

        def run_dq(tile: Shape) -> None:
            _backward_q[self._grid(q, tile.queries)](
                q, k, v, out, grad_out, lse, delta, dq, *rows.tensors,
                q.stride()[:3], k.stride()[:3], v.stride()[:3], out.stride()[:3],
                grad_out.stride()[:3], dq.stride()[:3], *common, **self._constants(q, k, tile),
            )  # fmt: skip

        def run_dkv(tile: Shape) -> None:
            _backward_kv[self._grid(k, tile.keys)](
                q, k, v, grad_out, lse, delta, dk, dv, *columns.tensors,
                q.stride()[:3], k.stride()[:3], v.stride()[:3], grad_out.stride()[:3],
                dk.stride()[:3], dv.stride()[:3], *common, **self._constants(q, k, tile),
            )  # fmt: skip

        # the first writes the delta that the second reads
        self._launch("dq", q, run_dq)
        self._launch("dkv", q, run_dkv)
        return dq, dk, dv

    def facts(self) -> dict[str, str]:
        """The tiles that were used: kernel to queries x keys, warps, stages."""
        return {
            f"{kernel} {_name(dtype)} {dim}": f"{s.queries}x{s.keys}, {s.warps} warps, {s.stages}"
            for (kernel, dim, dtype), s in self._shapes.items()
        }

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if reason := unavailable_reason(self.block, q.shape[-1], q.dtype):
            raise UnsupportedError(reason)
        batch, heads, tokens, dim = q.shape
        if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (batch, tokens, dim):
            raise UnsupportedError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: "
                "they may differ in heads only, and k and v not at all"
            )
        if tokens != self.seq_len:
            raise UnsupportedError(f"the layout is of {self.seq_len} tokens, q of {tokens}")
        if heads % k.shape[1]:
            raise UnsupportedError(f"{k.shape[1]} key heads don't divide {heads} query heads")
        if len(self.layouts) not in (1, heads):
            raise UnsupportedError(f"{len(self.layouts)} layouts for {heads} query heads")
        if {k.dtype, v.dtype} != {q.dtype}:
            raise UnsupportedError("q, k and v need one dtype")
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
        """One program for so many tokens of a block, for each head and batch of `owner`."""
        parts = self.block // tokens
        programs = self.layouts[0].rows * parts * owner.shape[0] * owner.shape[1]
        if programs > MOST_PROGRAMS:
            raise KernelLimitError(
                f"{programs} programs of {tokens} tokens are more than the {MOST_PROGRAMS} "
                "that one launch takes"
            )
        return (programs,)

    def _launch(self, kernel: str, q: Tensor, run: Callable[[Shape], None]) -> None:
        """Runs it with the tile that suits, or with the largest smaller one that the device has
        the shared memory for."""
        if is_meta():
            return
        key = (kernel, q.shape[3], q.dtype)
        tile = self._shapes.get(key) or shape(kernel, self.block, q.shape[3], q.dtype)
        on_device = torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()
        with on_device:
            self._shapes[key] = fit(tile, run)


def fit(tile: Shape, run: Callable[[Shape], None]) -> Shape:
    """Runs with `tile` or, where it takes more than the device has, the next smaller that does not.

    Returns the one it ran with. Raises KernelLimitError where none is small enough.
    """
    while True:
        try:
            run(tile)
        except OutOfResources as error:
            smaller = tile.smaller()
            if smaller is None:
                raise KernelLimitError(
                    f"no tile is small enough for this device: {error}"
                ) from error
            tile = smaller
        else:
            return tile


@dataclass(frozen=True)
class _Lists:
    """Compressed rows (or columns) of every layout on a device, one layout after the other.

    indptr (layouts, rows + 1) int64, offset into indices int32; order (layouts, rows) int32, or
    (1, rows) for all together, the longest row first.
    """

    indptr: Tensor
    indices: Tensor
    order: Tensor

    @property
    def rows(self) -> int:
        return self.order.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.order


def _lists(
    lists: Sequence[tuple[Ints, NDArray[np.int32]]], device: torch.device, together: bool = False
) -> _Lists:
    """`together`: one order for all layouts, by what they hold in sum."""
    starts = np.cumsum([0] + [len(indices) for _, indices in lists[:-1]])
    indptr = np.stack([own + start for (own, _), start in zip(lists, starts, strict=True)])
    # equal rows stay in sequence, so that programs side by side share keys
    held = np.diff(indptr)
    held = held.sum(0, keepdims=True) if together else held
    order = np.argsort(-held, axis=1, kind="stable")
    return _Lists(
        torch.from_numpy(indptr.astype(np.int64)).to(device),
        torch.from_numpy(np.concatenate([indices for _, indices in lists])).to(device),
        torch.from_numpy(order.astype(np.int32)).to(device),
    )


def _dense_rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- on the device -----------------------------------------------------------------------------


def _kernel(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_kernel
def _place(
    rows: tensor, heads: tensor, order: tensor, PARTS: tl.constexpr, SHARED: tl.constexpr
) -> tensor:
    """Batch, head, layout and block of this program, and which part of the block it has."""
    program = tl.program_id(0)
    part = program % PARTS
    place = program // PARTS
    head = (place // rows % heads).to(tl.int64)
    batch = (place // rows // heads).to(tl.int64)
    layout = head * 0 if SHARED else head
    block = tl.load(order + layout * rows + place % rows).to(tl.int64)
    return batch, head, layout, block, part


@_kernel
def _span(indptr: tensor, layout: tensor, rows: tensor, row: tensor) -> tensor:
    """Where a row's blocks start and end in the list."""
    own = indptr + layout * (rows + 1) + row
    return tl.load(own), tl.load(own + 1)


@_kernel
def _tile_at(
    base: tensor, first: tensor, stride: tensor, ROWS: tl.constexpr, WIDE: tl.constexpr
) -> tensor:
    """Addresses of ROWS tokens of one head from token `first`, (ROWS, WIDE)."""
    tokens = tl.arange(0, ROWS).to(tl.int64) * stride
    return base + first * stride + tokens[:, None] + tl.arange(0, WIDE)[None, :]


@_kernel
def _inside(
    first: tensor, seq_len: tensor, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr
) -> tensor:
    """Which of those are within the sequence and the head, (ROWS, WIDE)."""
    tokens = first + tl.arange(0, ROWS)
    return (tokens < seq_len)[:, None] & (tl.arange(0, WIDE) < DIM)[None, :]


@_kernel
def _load(
    base: tensor, first: tensor, stride: tensor, seq_len: tensor, ROWS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """ROWS tokens of one head from `first`, (ROWS, WIDE); 0 beyond the head and, where there may
    be a TAIL, beyond the sequence."""
    at = _tile_at(base, first, stride, ROWS, WIDE)
    if TAIL:
        return tl.load(at, mask=_inside(first, seq_len, ROWS, DIM, WIDE), other=0.0)
    if WIDE != DIM:
        return tl.load(at, mask=(tl.arange(0, WIDE) < DIM)[None, :], other=0.0)
    return tl.load(at)


@_kernel
def _store(
    base: tensor, first: tensor, stride: tensor, seq_len: tensor, numbers: tensor,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
) -> tensor:  # fmt: skip
    """The opposite of _load."""
    at = _tile_at(base, first, stride, ROWS, WIDE)
    inside = _inside(first, seq_len, ROWS, DIM, WIDE)
    tl.store(at, numbers.to(base.dtype.element_ty), mask=inside)


@_kernel
def _load_row(
    base: tensor, first: tensor, seq_len: tensor, other: tensor, ROWS: tl.constexpr,
    TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """One number a token of one head; `other` beyond the sequence."""
    tokens = first + tl.arange(0, ROWS)
    if TAIL:
        return tl.load(base + tokens, mask=tokens < seq_len, other=other)
    return tl.load(base + tokens)


@_kernel
def _load_lse(
    base: tensor, first: tensor, seq_len: tensor, ROWS: tl.constexpr, TAIL: tl.constexpr
) -> tensor:
    """Log-sum-exps in base 2; +inf for queries that see nothing or are none: weights of 0."""
    lse = _load_row(base, first, seq_len, float("inf"), ROWS, TAIL)
    return tl.where(lse == float("-inf"), float("inf"), lse) * _LOG2_E


@_kernel
def _seen(
    query: tensor, key: tensor, seq_len: tensor, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Which queries from token `query` see which keys from token `key`, (M, N)."""
    keys = key + tl.arange(0, N)
    seen = (keys < seq_len)[None, :]
    if CAUSAL:
        queries = query + tl.arange(0, M)
        seen = seen & (keys[None, :] <= queries[:, None])
    return seen


@_kernel
def _end_of_whole(
    indices: tensor, end: tensor, block: tensor, rows: tensor, CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Where the key blocks that are seen whole end in a row: before its end or at it."""
    if CAUSAL:
        return end - (tl.load(indices + end - 1) == block).to(tl.int64)
    if TAIL:
        return end - (tl.load(indices + end - 1) == rows - 1).to(tl.int64)
    return end


@_kernel
def _keys_of_last(
    query: tensor, key: tensor, seq_len: tensor, BLOCK: tl.constexpr, M: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Keys of a row's last block, from token `key`, that any query from `query` sees."""
    if CAUSAL:
        return tl.minimum(query + M, seq_len) - key
    return tl.minimum(seq_len - key, BLOCK)


@_kernel
def _attend(
    q: tensor, sums: tensor, top: tensor, total: tensor, k: tensor, v: tensor, k_stride: tensor,
    v_stride: tensor, indices: tensor, begin: tensor, end: tensor, query: tensor, seq_len: tensor,
    scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr,
    PARTLY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Online softmax over the tiles [begin, end) of a list of key blocks."""
    PARTS: tl.constexpr = BLOCK // N
    for at in range(begin, end):
        key = tl.load(indices + at // PARTS).to(tl.int64) * BLOCK + at % PARTS * N
        keys = _load(k, key, k_stride, seq_len, N, DIM, WIDE, PARTLY)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if PARTLY:
            scores = tl.where(_seen(query, key, seq_len, M, N, CAUSAL), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None]
        values = _load(v, key, v_stride, seq_len, N, DIM, WIDE, PARTLY)
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        top = higher
    return sums, top, total


@_kernel
def _forward(
    q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, indptr: tensor, indices: tensor,
    order: tensor, q_strides: tl.tuple, k_strides: tl.tuple, v_strides: tl.tuple,
    out_strides: tl.tuple, seq_len: tensor, rows: tensor, heads: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KEEP_LSE: tl.constexpr,
) -> tensor:  # fmt: skip
    """M queries of one head: their output and log-sum-exp."""
    PARTS: tl.constexpr = BLOCK // N
    batch, head, layout, block, part = _place(rows, heads, order, BLOCK // M, SHARED)
    begin, end = _span(indptr, layout, rows, block)
    query = block * BLOCK + part * M
    own = _load(
        q + batch * q_strides[0] + head * q_strides[1], query, q_strides[2], seq_len,
        M, DIM, WIDE, TAIL,
    )  # fmt: skip
    k += batch * k_strides[0] + head // GROUP * k_strides[1]
    v += batch * v_strides[0] + head // GROUP * v_strides[1]
    scale = scale * _LOG2_E
    sums = tl.zeros([M, WIDE], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    whole = _end_of_whole(indices, end, block, rows, CAUSAL, TAIL)
    sums, top, total = _attend(
        own, sums, top, total, k, v, k_strides[2], v_strides[2], indices,
        begin * PARTS, whole * PARTS, query, seq_len, scale,
        BLOCK, DIM, WIDE, CAUSAL, False, M, N,
    )  # fmt: skip
    if CAUSAL or TAIL:
        last = tl.load(indices + end - 1).to(tl.int64) * BLOCK
        keys = _keys_of_last(query, last, seq_len, BLOCK, M, CAUSAL) * (end - whole)
        sums, top, total = _attend(
            own, sums, top, total, k, v, k_strides[2], v_strides[2], indices,
            whole * PARTS, whole * PARTS + tl.cdiv(keys, N), query, seq_len, scale,
            BLOCK, DIM, WIDE, CAUSAL, True, M, N,
        )  # fmt: skip
    out += batch * out_strides[0] + head * out_strides[1]
    _store(out, query, out_strides[2], seq_len, sums / total[:, None], M, DIM, WIDE)
    if KEEP_LSE:
        tokens = query + tl.arange(0, M)
        lse += (batch * heads + head) * seq_len
        tl.store(lse + tokens, (top + tl.log2(total)) * _LOG_2, mask=tokens < seq_len)


@_kernel
def _add_to_dq(
    dq: tensor, q: tensor, grad: tensor, lse: tensor, delta: tensor, k: tensor, v: tensor,
    k_stride: tensor, v_stride: tensor, indices: tensor, begin: tensor, end: tensor, query: tensor,
    seq_len: tensor, scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, PARTLY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """dQ, unscaled, from the tiles [begin, end) of a list of key blocks."""
    PARTS: tl.constexpr = BLOCK // N
    for at in range(begin, end):
        key = tl.load(indices + at // PARTS).to(tl.int64) * BLOCK + at % PARTS * N
        keys = _load(k, key, k_stride, seq_len, N, DIM, WIDE, PARTLY)
        values = _load(v, key, v_stride, seq_len, N, DIM, WIDE, PARTLY)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if PARTLY:
            scores = tl.where(_seen(query, key, seq_len, M, N, CAUSAL), scores, float("-inf"))
        weights = tl.exp2(scores - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(values), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None])
        dq = tl.dot(grad_scores.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@_kernel
def _backward_q(
    q: tensor, k: tensor, v: tensor, out: tensor, grad_out: tensor, lse: tensor, delta: tensor,
    dq: tensor, indptr: tensor, indices: tensor, order: tensor, q_strides: tl.tuple,
    k_strides: tl.tuple, v_strides: tl.tuple, out_strides: tl.tuple, grad_strides: tl.tuple,
    dq_strides: tl.tuple, seq_len: tensor, rows: tensor, heads: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """M queries of one head: dQ, and delta, the sum of out * grad_out, for dK."""
    PARTS: tl.constexpr = BLOCK // N
    batch, head, layout, block, part = _place(rows, heads, order, BLOCK // M, SHARED)
    begin, end = _span(indptr, layout, rows, block)
    query = block * BLOCK + part * M
    q += batch * q_strides[0] + head * q_strides[1]
    out += batch * out_strides[0] + head * out_strides[1]
    grad_out += batch * grad_strides[0] + head * grad_strides[1]
    k += batch * k_strides[0] + head // GROUP * k_strides[1]
    v += batch * v_strides[0] + head // GROUP * v_strides[1]
    grad = _load(grad_out, query, grad_strides[2], seq_len, M, DIM, WIDE, TAIL)
    outs = _load(out, query, out_strides[2], seq_len, M, DIM, WIDE, TAIL)
    own_delta = tl.sum(outs.to(tl.float32) * grad.to(tl.float32), 1)
    tokens = query + tl.arange(0, M)
    row = (batch * heads + head) * seq_len
    tl.store(delta + row + tokens, own_delta, mask=tokens < seq_len)
    own_lse = _load_lse(lse + row, query, seq_len, M, TAIL)
    own = _load(q, query, q_strides[2], seq_len, M, DIM, WIDE, TAIL)
    sums = tl.zeros([M, WIDE], tl.float32)
    whole = _end_of_whole(indices, end, block, rows, CAUSAL, TAIL)
    sums = _add_to_dq(
        sums, own, grad, own_lse, own_delta, k, v, k_strides[2], v_strides[2], indices,
        begin * PARTS, whole * PARTS, query, seq_len, scale * _LOG2_E,
        BLOCK, DIM, WIDE, CAUSAL, False, M, N,
    )  # fmt: skip
    if CAUSAL or TAIL:
        last = tl.load(indices + end - 1).to(tl.int64) * BLOCK
        keys = _keys_of_last(query, last, seq_len, BLOCK, M, CAUSAL) * (end - whole)
        sums = _add_to_dq(
            sums, own, grad, own_lse, own_delta, k, v, k_strides[2], v_strides[2], indices,
            whole * PARTS, whole * PARTS + tl.cdiv(keys, N), query, seq_len, scale * _LOG2_E,
            BLOCK, DIM, WIDE, CAUSAL, True, M, N,
        )  # fmt: skip
    dq += batch * dq_strides[0] + head * dq_strides[1]
    _store(dq, query, dq_strides[2], seq_len, sums * scale, M, DIM, WIDE)


@_kernel
def _add_to_dkv(
    dk: tensor, dv: tensor, k: tensor, v: tensor, q: tensor, grad_out: tensor, q_stride: tensor,
    grad_stride: tensor, lse: tensor, delta: tensor, indices: tensor, begin: tensor, end: tensor,
    key: tensor, seq_len: tensor, scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """dK, unscaled, and dV of N keys from the tiles [begin, end) of a list of query blocks; scores
    stand with keys first, (N, M)."""
    PARTS: tl.constexpr = BLOCK // M
    for at in range(begin, end):
        query = tl.load(indices + at // PARTS).to(tl.int64) * BLOCK + at % PARTS * M
        queries = _load(q, query, q_stride, seq_len, M, DIM, WIDE, TAIL)
        grad = _load(grad_out, query, grad_stride, seq_len, M, DIM, WIDE, TAIL)
        row_lse = _load_lse(lse, query, seq_len, M, TAIL)
        row_delta = _load_row(delta, query, seq_len, 0.0, M, TAIL)
        scores = tl.dot(k, tl.trans(queries), input_precision="ieee") * scale
        if CAUSAL:
            later = (key + tl.arange(0, N))[:, None] > (query + tl.arange(0, M))[None, :]
            scores = tl.where(later, float("-inf"), scores)
        weights = tl.exp2(scores - row_lse[None, :])
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_scores = weights * (grad_weights - row_delta[None, :])
        dk = tl.dot(grad_scores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@_kernel
def _whole_queries(
    indices: tensor, begin: tensor, end: tensor, block: tensor, rows: tensor, CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Where the query blocks of a column that see it whole, and have all their queries, start and
    end: after the diagonal, before the short last block."""
    whole = begin
    if CAUSAL:
        first = tl.load(indices + begin, mask=begin < end, other=-1)
        whole = begin + (first == block).to(tl.int64)
    last = end
    if TAIL:
        short = tl.load(indices + end - 1, mask=whole < end, other=-1)
        last = end - (short == rows - 1).to(tl.int64)
    return whole, last


@_kernel
def _backward_kv(
    q: tensor, k: tensor, v: tensor, grad_out: tensor, lse: tensor, delta: tensor, dk: tensor,
    dv: tensor, indptr: tensor, indices: tensor, order: tensor, q_strides: tl.tuple,
    k_strides: tl.tuple, v_strides: tl.tuple, grad_strides: tl.tuple, dk_strides: tl.tuple,
    dv_strides: tl.tuple, seq_len: tensor, rows: tensor, heads: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """N keys of one key head: dK and dV from every query head of its group."""
    PARTS: tl.constexpr = BLOCK // M
    batch, head, layout, block, part = _place(rows, heads // GROUP, order, BLOCK // N, True)
    key = block * BLOCK + part * N
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    keys = _load(k, key, k_strides[2], seq_len, N, DIM, WIDE, TAIL)
    values = _load(v, key, v_strides[2], seq_len, N, DIM, WIDE, TAIL)
    k_sums = tl.zeros([N, WIDE], tl.float32)
    v_sums = tl.zeros([N, WIDE], tl.float32)
    for member in range(GROUP):
        q_head = head * GROUP + member
        begin, end = _span(indptr, layout if SHARED else q_head, rows, block)
        row = (batch * heads + q_head) * seq_len
        q_own = q + batch * q_strides[0] + q_head * q_strides[1]
        grad_own = grad_out + batch * grad_strides[0] + q_head * grad_strides[1]
        whole, last = _whole_queries(indices, begin, end, block, rows, CAUSAL, TAIL)
        if CAUSAL:
            first = begin * PARTS + part * N // M
            k_sums, v_sums = _add_to_dkv(
                k_sums, v_sums, keys, values, q_own, grad_own, q_strides[2], grad_strides[2],
                lse + row, delta + row, indices, first, whole * PARTS, key, seq_len,
                scale * _LOG2_E, BLOCK, DIM, WIDE, TAIL, True, M, N,
            )  # fmt: skip
        k_sums, v_sums = _add_to_dkv(
            k_sums, v_sums, keys, values, q_own, grad_own, q_strides[2], grad_strides[2],
            lse + row, delta + row, indices, whole * PARTS, last * PARTS, key, seq_len,
            scale * _LOG2_E, BLOCK, DIM, WIDE, False, False, M, N,
        )  # fmt: skip
        if TAIL:
            k_sums, v_sums = _add_to_dkv(
                k_sums, v_sums, keys, values, q_own, grad_own, q_strides[2], grad_strides[2],
                lse + row, delta + row, indices, last * PARTS, end * PARTS, key, seq_len,
                scale * _LOG2_E, BLOCK, DIM, WIDE, True, False, M, N,
            )  # fmt: skip
    dk += batch * dk_strides[0] + head * dk_strides[1]
    dv += batch * dv_strides[0] + head * dv_strides[1]
    _store(dk, key, dk_strides[2], seq_len, k_sums * scale, N, DIM, WIDE)
    _store(dv, key, dv_strides[2], seq_len, v_sums, N, DIM, WIDE)
