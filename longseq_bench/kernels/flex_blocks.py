"""FlexAttention (arXiv 2412.05496), torch's compiled attention, over block layouts.

Its tables of blocks are padded to the widest row. A layout is refused if a few wide rows would make
the padded table almost dense. Full blocks run without a mask; the causal diagonal has one; the
kernels find the end of a short last block from the sequence length.

Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim; H layouts (1 or Hq), R rows of
a layout, W blocks of its widest row.
"""

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
"""C++ compilers; torch.compile needs one of them on a CPU."""

SMALL = 2**28
"""Bytes of a table up to which any padding is accepted."""

MOST_PADDING = 16
"""Entries per kept block that a larger table may have."""


@functools.cache
def compiled() -> Callable[..., Any]:
    """Return flex_attention, compiled once per process for every length.

    It compiles without helper processes, which would count as leftovers of the trial. Raises
    UnsupportedError if torch.compile is disabled: the uncompiled function stores all scores.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    from torch.nn.attention.flex_attention import flex_attention

    if dynamo.disable:
        raise UnsupportedError("FlexAttention has to be compiled, and torch.compile is disabled")
    inductor.compile_threads = 1
    # fullgraph: raise instead of running a part of the graph uncompiled
    made: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return made


def _no_later(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def unavailable_reason(device: str, train: bool) -> str | None:
    """Return the reason why FlexAttention can't run on a device, or None."""
    if device != "cpu":
        return None
    if not any(shutil.which(c) for c in COMPILERS):
        return f"FlexAttention needs a compiler on a CPU, and there is no {' or '.join(COMPILERS)}"
    return "FlexAttention has no backward on a CPU" if train else None


class FlexBlocks:
    """An AttentionKernel over one layout, or over one layout per query head.

    q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq; out like q; log-sum-exp (B, Hq, N), natural,
    float32. On a CPU there is only the forward, without log-sum-exp. Calling the object is
    differentiable; `backward` runs the forward again.

    Raises UnsupportedError for a device, dtype, block, number of heads or padding it can't take.
    """

    def __init__(self, layouts: BlockLayout | Sequence[BlockLayout]) -> None:
        self.layouts = (layouts,) if isinstance(layouts, BlockLayout) else tuple(layouts)
        settings = {(one.seq_len, one.block, one.causal) for one in self.layouts}
        if len(settings) != 1:
            raise UnsupportedError(
                "FlexAttention needs one layout, or one per query head of the same tokens, block "
                "and causality"
            )
        self.seq_len, self.block, self.causal = settings.pop()
        self._masks: dict[tuple[torch.device, bool], Any] = {}

    def prepare(self, device: torch.device | str, train: bool = False) -> Any:
        """Return the block mask on a device, built once; `train` adds the backward's tables."""
        device = torch.empty(0, device=device).device
        if reason := unavailable_reason(device.type, train):
            raise UnsupportedError(reason)
        if (device, train) not in self._masks:
            self._masks[device, train] = self._mask(device, train)
        return self._masks[device, train]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output (B, Hq, N, D), differentiable on CUDA."""
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        return cast(Tensor, self._run(q, k, v, train))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
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
        """Return the gradients of q, k, v by autograd, for the softmax over this layout alone."""
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            again = self._run(leaves[0], leaves[1], leaves[2], True)
        dq, dk, dv = torch.autograd.grad(again, leaves, grad_out)
        return dq, dk, dv

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

        full, masked = _full_and_masked(self.layouts)
        tables: list[Tensor | None] = [*self._table(masked, device), *self._table(full, device)]
        if train:
            for lists in (masked, full):
                tables += self._table([_transposed(one) for one in lists], device)
        else:
            tables += [None] * 4
        make: Callable[..., Any] = BlockMask
        lengths, blocks = (self.seq_len, self.seq_len), (self.block, self.block)
        return make(lengths, *tables, blocks, _no_later if self.causal else noop_mask)

    def _table(self, lists: Sequence[Lists], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return blocks per row (1, H, R) and their indices (1, H, R, W), padded with 0, int32.

        On a CPU the table is a view R wide of the same storage, as the lowering there expects.
        """
        counts = np.stack([np.diff(indptr) for indptr, _ in lists]).astype(np.int32)
        heads, rows = counts.shape
        widest = max(1, int(counts.max()))
        kept = int(counts.sum())
        size = 4 * heads * rows * widest
        if size > SMALL and heads * rows * widest > MOST_PADDING * max(kept, heads * rows):
            raise UnsupportedError(
                f"FlexAttention pads all {rows} rows to the widest, {widest} blocks: "
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
    """Return options that make the tiles of the CUDA kernels divide a block; {} if torch's do.

    Raises UnsupportedError if no tile does.
    """
    if block % 128 == 0:
        return {}
    divides = block & -block
    if divides < 16:
        raise UnsupportedError(f"FlexAttention's tiles need a block divisible by 16, not {block}")
    tile = min(divides, 64 if head_dim * dtype.itemsize <= 256 else 32)
    names = ("fwd_BLOCK_M", "fwd_BLOCK_N", *(f"bwd_BLOCK_{n}" for n in ("M1", "N1", "M2", "N2")))
    return dict.fromkeys(names, tile)


def _full_and_masked(layouts: Sequence[BlockLayout]) -> tuple[list[Lists], list[Lists]]:
    """Return the full blocks of each layout, and those of which only a triangle is seen."""
    full, masked = [], []
    for one in layouts:
        own = np.repeat(np.arange(one.rows), np.diff(one.indptr))
        diagonal = (own == one.indices) & one.causal
        full.append(_compressed(own[~diagonal], one.indices[~diagonal], one.rows))
        masked.append(_compressed(own[diagonal], one.indices[diagonal], one.rows))
    return full, masked


def _compressed(own: Ints, indices: NDArray[np.int32], rows: int) -> Lists:
    counts = np.bincount(own, minlength=rows)
    return np.concatenate(([0], np.cumsum(counts))), indices


def _transposed(lists: Lists) -> Lists:
    indptr, indices = lists
    rows = len(indptr) - 1
    own = np.repeat(np.arange(rows, dtype=np.int32), np.diff(indptr))
    order = np.argsort(indices, kind="stable")
    return _compressed(indices[order].astype(np.int64), own[order], rows)
