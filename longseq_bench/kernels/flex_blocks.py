"""FlexAttention (arXiv 2412.05496), torch's compiled attention, over block layouts.

Its tables of blocks are padded to the widest row: compact where rows are alike, refused where a few
rows see so much more than the others that padding would make them dense again. Blocks that are seen
whole run without a mask; the causal diagonal has one; the short last block is known to the kernels
by the sequence's length.

Letters: B batch, Hq and Hk query and key heads, N tokens, D head_dim; H layouts (1 or Hq), R rows
of a layout, W blocks of its widest row.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.units import format_bytes
from longseq_bench.patterns.block_layout import BlockLayout, Ints

Lists = tuple[Ints, NDArray[np.int32]]
"""Compressed rows: indptr, indices."""

COMPILERS = ("g++", "clang++", "c++")
"""Of which torch.compile needs one, for a CPU."""

SMALL = 2**28
"""Bytes of a table that may be padded however much."""

MOST_PADDING = 16
"""Numbers that a larger table may hold for each block that is kept."""


@functools.cache
def compiled() -> Callable[..., Any]:
    """flex_attention, compiled once a process, for every length. Compiled in this process: helpers
    of the compiler would count as strays of the trial.

    Raises UnsupportedError where torch.compile is switched off: it would hand back the function as
    it is, which holds the scores of all pairs.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    from torch.nn.attention.flex_attention import flex_attention

    if dynamo.disable:
        raise UnsupportedError("FlexAttention has to be compiled, and torch.compile is disabled")
    inductor.compile_threads = 1
    # a graph that does not compile as a whole, or too often, raises
    made: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return made


def _no_later(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def unavailable_reason(device: str, train: bool) -> str | None:
    """Why FlexAttention can't run there; None where it can."""
    if device != "cpu":
        return None
    if not any(shutil.which(c) for c in COMPILERS):
        return f"FlexAttention is compiled on a CPU, and there is no {' or '.join(COMPILERS)}"
    return "FlexAttention has no backward on a CPU" if train else None


class FlexBlocks:
    """Attention over one layout, or over one a query head: an AttentionKernel.

    q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq; out like q, log-sum-exp (B, Hq, N), natural,
    float32. A CPU has the forward only, without its log-sum-exp. Raises UnsupportedError where the
    device, the dtype, the block, the heads or the padding don't suit.

    Called with q, k, v it is differentiable by itself; `backward` runs the forward once more.
    """

    def __init__(self, layouts: BlockLayout | Sequence[BlockLayout]) -> None:
        self.layouts = (layouts,) if isinstance(layouts, BlockLayout) else tuple(layouts)
        alike = {(one.seq_len, one.block, one.causal) for one in self.layouts}
        if len(alike) != 1:
            raise UnsupportedError(
                "FlexAttention needs one layout, or one a query head of the same tokens, block "
                "and causality"
            )
        self.seq_len, self.block, self.causal = alike.pop()
        self._masks: dict[tuple[torch.device, bool], Any] = {}

    def prepare(self, device: torch.device | str, train: bool = False) -> Any:
        """The block mask on a device, made once; with lists for the backward where `train`."""
        device = torch.empty(0, device=device).device
        if reason := unavailable_reason(device.type, train):
            raise UnsupportedError(reason)
        if (device, train) not in self._masks:
            self._masks[device, train] = self._mask(device, train)
        return self._masks[device, train]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Output (B, Hq, N, D), differentiable on CUDA."""
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        return cast(Tensor, self._run(q, k, v, train))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, Hq, N, D) and, where kept, the log-sum-exp (B, Hq, N)."""
        from torch.nn.attention.flex_attention import AuxRequest

        with torch.no_grad():
            if not keep_lse:
                return self._run(q, k, v, False), None
            if q.device.type == "cpu":
                raise UnsupportedError("FlexAttention gives no log-sum-exp on a CPU")
            out, more = self._run(q, k, v, False, return_aux=AuxRequest(lse=True))
            return out, more.lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v by torch's autograd, for the softmax over this layout alone."""
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            again = self._run(leaves[0], leaves[1], leaves[2], True)
        dq, dk, dv = torch.autograd.grad(again, leaves, grad_out)
        return dq, dk, dv

    def table_bytes(self, device: torch.device | str, train: bool = False) -> int:
        """Bytes of the tables on a device."""
        mask = self.prepare(device, train)
        found = [getattr(mask, name) for name in mask._TENSOR_ATTRS]
        return sum(t.untyped_storage().nbytes() for t in found if t is not None)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, train: bool, **more: Any) -> Any:
        if q.shape[2] != self.seq_len:
            raise UnsupportedError(f"the layout is of {self.seq_len} tokens, q of {q.shape[2]}")
        if len(self.layouts) not in (1, q.shape[1]):
            raise UnsupportedError(f"{len(self.layouts)} layouts for {q.shape[1]} query heads")
        if q.shape[3] < 16:
            raise UnsupportedError(f"FlexAttention needs head_dim 16, not {q.shape[3]}")
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise UnsupportedError(f"FlexAttention has no kernel for {q.dtype}")
        options = tile_options(self.block, q.shape[3], q.dtype) if q.is_cuda else {}
        return compiled()(
            q, k, v, block_mask=self.prepare(q.device, train),
            enable_gqa=q.shape[1] != k.shape[1], kernel_options=options or None, **more,
        )  # fmt: skip

    def _mask(self, device: torch.device, train: bool) -> Any:
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        whole, partly = _whole_and_partly(self.layouts)
        tables: list[Tensor | None] = [*self._table(partly, device), *self._table(whole, device)]
        if train:
            for lists in (partly, whole):
                tables += self._table([_transposed(one) for one in lists], device)
        else:
            tables += [None] * 4
        make: Callable[..., Any] = BlockMask
        lengths, blocks = (self.seq_len, self.seq_len), (self.block, self.block)
        return make(lengths, *tables, blocks, _no_later if self.causal else noop_mask)

    def _table(self, lists: Sequence[Lists], device: torch.device) -> tuple[Tensor, Tensor]:
        """How many blocks each row has (1, H, R), and which, padded with 0 (1, H, R, W), int32.

        On a CPU the table is seen R wide, as the lowering there asks for, in the same storage.
        """
        counts = np.stack([np.diff(indptr) for indptr, _ in lists]).astype(np.int32)
        heads, rows = counts.shape
        widest = max(1, int(counts.max()))
        kept = int(counts.sum())
        size = 4 * heads * rows * widest
        if size > SMALL and heads * rows * widest > MOST_PADDING * max(kept, heads * rows):
            raise UnsupportedError(
                f"FlexAttention pads all {rows} rows to the widest, of {widest} blocks: "
                f"{format_bytes(size)} for {kept} blocks that are kept"
            )
        wide = rows if device.type == "cpu" else widest
        storage = np.zeros(heads * rows * widest + wide - widest, dtype=np.int32)
        table = storage[: heads * rows * widest].reshape(heads, rows, widest)
        for head, (_, indices) in enumerate(lists):
            table[head][np.arange(widest) < counts[head][:, None]] = indices
        numbers = torch.from_numpy(storage).to(device)
        strides = (0, rows * widest, widest, 1)
        seen = numbers.as_strided((1, heads, rows, wide), strides)
        return torch.from_numpy(counts).to(device)[None], seen


def tile_options(block: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Options that make the tiles of the CUDA kernels divide a block; none where torch's own do.

    Raises UnsupportedError where no tile does.
    """
    if block % 128 == 0:
        return {}
    divides = block & -block
    if divides < 16:
        raise UnsupportedError(f"FlexAttention's tiles need a block divisible by 16, not {block}")
    tile = min(divides, 64 if head_dim * dtype.itemsize <= 256 else 32)
    names = ("fwd_BLOCK_M", "fwd_BLOCK_N", *(f"bwd_BLOCK_{n}" for n in ("M1", "N1", "M2", "N2")))
    return dict.fromkeys(names, tile)


def _whole_and_partly(layouts: Sequence[BlockLayout]) -> tuple[list[Lists], list[Lists]]:
    """Each layout's blocks that are seen whole, and those of which a triangle is."""
    whole, partly = [], []
    for one in layouts:
        own = np.repeat(np.arange(one.rows), np.diff(one.indptr))
        diagonal = (own == one.indices) & one.causal
        whole.append(_compressed(own[~diagonal], one.indices[~diagonal], one.rows))
        partly.append(_compressed(own[diagonal], one.indices[diagonal], one.rows))
    return whole, partly


def _compressed(own: Ints, indices: NDArray[np.int32], rows: int) -> Lists:
    counts = np.bincount(own, minlength=rows)
    return np.concatenate(([0], np.cumsum(counts))), indices


def _transposed(lists: Lists) -> Lists:
    indptr, indices = lists
    rows = len(indptr) - 1
    own = np.repeat(np.arange(rows, dtype=np.int32), np.diff(indptr))
    order = np.argsort(indices, kind="stable")
    return _compressed(indices[order].astype(np.int64), own[order], rows)
