"""FlexAttention (arXiv 2412.05496), torch's compiled attention, over block layouts.

Its tables of blocks are padded to the widest row. Full blocks run without a mask, the causal
diagonal with one; the kernels find the end of a short last block from the sequence length.

Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim; H layouts (1 or Hq), R rows of
a layout, W blocks of its widest row.
"""

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.cpp_build import COMPILERS
from longseq_bench.kernels.spans import check_shapes
from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.visible_keys import VisibleKeys

Entries = tuple[Ints, NDArray[np.int32]]
"""The row and the block of each entry of a table, row by row."""

MIN_HEAD_DIM = 16
"""The smallest head_dim that the kernels can multiply."""

ALIGNED_INDICES = 4
"""A table begins at a multiple of so many indices: torch copies an input that is not aligned to 16
bytes before each call."""

MAX_COMPILATIONS = 64
"""Variants that a process may compile: by dtype, heads, mask, stride order, and with gradients."""


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
    # torch 2.13 can't compile a score_mod with a number that may change, as a soft cap
    dynamo.specialize_float = True
    # a ring or stages of heads compile more variants than torch's 8, where it would raise
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_COMPILATIONS)
    # fullgraph: raise instead of running a part of the graph uncompiled
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scores: Scores, **options: Any) -> Any:
    """Return flex_attention's output for q (B, Hq, N, D) and k, v (B, Hk, N, D), compiled."""
    # torch 2.13 can't compile its default scale for some sequences of shapes in a process
    options |= {"scale": scores.scale_for(q.shape[3]), "enable_gqa": q.shape[1] != k.shape[1]}
    if scores.soft_cap:
        options["score_mod"] = lambda score, *_: scores.of(score)
    return compiled()(q, k, v, block_mask=block_mask, **options)


def causal_mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return True where a query sees a key under a causal mask (a mask_mod)."""
    return q >= k


def causal_block_mask(tokens: int, block: int, device: torch.device | str, train: bool) -> Any:
    """Return a block mask whose row i has blocks 0 to i - 1 in full and block i in part.

    Its tables are views of O(tokens / block) numbers: the compiler wants them as wide as there are
    rows, but they hold few different numbers. To build the mask from a function of positions would
    take 10 tokens² bytes. train: add the tables of a backward, by columns; torch would compute them
    with dense tables of rows² numbers, 24 GB for ten million tokens.
    """
    rows = -(-tokens // block)
    steps = torch.arange(2 * rows, dtype=torch.int32, device=device)

    def table(numbers: Tensor) -> Tensor:
        """Return a table whose row i begins with number i."""
        return numbers.as_strided((1, 1, rows, rows), (0, 0, 1, 1))

    ones = torch.ones(1, 1, rows, dtype=torch.int32, device=device)
    counts, diagonal = steps[:rows].reshape(1, 1, rows), table(steps)
    by_column: tuple[Tensor | None, ...] = (None,) * 4
    if train:
        # rows i + 1 to the last see block i in full
        by_column = ones, diagonal, counts.flip(-1), table(steps + 1)
    by_row = ones, diagonal, counts, table(_earlier_blocks(steps))
    return _block_mask((tokens, tokens), (*by_row, *by_column), block, causal_mask_mod)


def _block_mask(
    lengths: tuple[int, int], tables: Sequence[Tensor | None], block: int, mask_mod: Any
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    make: Callable[..., Any] = BlockMask
    return make(lengths, *tables, (block, block), mask_mod)


def _earlier_blocks(steps: Tensor) -> Tensor:
    """Return numbers of which those at i to 2i - 1 are 0 to i - 1 in some order, for every i.

    Both tables of a block mask need the same strides (see FlexBlocks._tables), and in that of the
    diagonal a row begins one number after the one before it. Number 2i + 1 is i, and number 2i is
    number i: so each stretch has what the one before it has, and one more.

    steps: 0, 1, ... (n,).
    """
    lowest_bit = (steps & -steps).clamp(min=1)
    return (steps // lowest_bit // 2).to(steps.dtype)


def interval_mask_mod(
    visible: VisibleKeys, positions: Ints, device: torch.device | str
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a mask as FlexAttention takes it: a function of batch, head, query and key.

    positions: of the queries, which the function numbers from 0.
    """
    ends = visible.first(positions), visible.stop(positions)
    first, stop = (torch.from_numpy(end).to(device) for end in ends)

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= first[q]) & (k < stop[q])

    return is_visible


def unavailable_reason(device: str, train: bool) -> str | None:
    """Return the reason why FlexAttention can't run on a device, or None."""
    if device != "cpu":
        return None
    if not any(shutil.which(c) for c in COMPILERS):
        return f"FlexAttention needs a compiler on a CPU, and there is no {' or '.join(COMPILERS)}"
    return "FlexAttention has no backward on a CPU" if train else None


def check_head_dim(head_dim: int) -> None:
    """Raise UnsupportedError for a head_dim that FlexAttention can't compute."""
    if head_dim < MIN_HEAD_DIM:
        raise UnsupportedError(f"FlexAttention needs head_dim >= {MIN_HEAD_DIM}, not {head_dim}")


class FlexBlocks:
    """An AttentionKernel over one layout, or over one layout per query head.

    On a CPU there is only the forward, without log-sum-exp. `backward` runs the forward again.

    Raises UnsupportedError for a device, dtype, block, number of heads or padding it can't take.
    """

    def __init__(self, layouts: Sequence[BlockLayout], scores: Scores = PLAIN_SCORES) -> None:
        self.layouts, self._scores = tuple(layouts), scores
        one, *_ = layouts  # an attention makes all of its layouts with the same sizes
        self.seq_len, self.block, self.causal = one.seq_len, one.block, one.causal
        self._masks: dict[tuple[torch.device, bool], Any] = {}

    def prepare(self, device: torch.device | str, train: bool = False) -> Any:
        """Return the block mask on a device, built once; `train` adds the backward's tables."""
        device = torch.empty(0, device=device).device
        if reason := unavailable_reason(device.type, train):
            raise UnsupportedError(reason)
        if (device, train) not in self._masks:
            self._masks[device, train] = self._mask(device, train)
        return self._masks[device, train]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
        from torch.nn.attention.flex_attention import AuxRequest

        with torch.no_grad():
            if not keep_lse:
                return self._run(q, k, v, False), None
            if q.device.type == "cpu":
                raise UnsupportedError("FlexAttention does not return the log-sum-exp on a CPU")
            out, more = self._run(q, k, v, False, return_aux=AuxRequest(lse=True))
            return out, more.lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k, v by autograd, for the softmax over this layout alone."""
        leaves = [t.detach().requires_grad_() for t in (queries[1], *keys)]
        with torch.enable_grad():
            again = self._run(leaves[0], leaves[1], leaves[2], True)
        dq, dk, dv = torch.autograd.grad(again, leaves, queries[0])
        return dq, dk, dv

    def _run(self, q: Tensor, k: Tensor, v: Tensor, train: bool, **more: Any) -> Any:
        heads = q.shape[1] if len(self.layouts) == 1 else len(self.layouts)
        check_shapes(q, k, v, heads, self.seq_len)
        check_head_dim(q.shape[3])
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise UnsupportedError(f"FlexAttention has no kernel for {q.dtype}")
        mask = self.prepare(q.device, train)
        tiles = tile_options(self.block, q.shape[3], q.dtype) if q.is_cuda else {}
        return attend(q, k, v, mask, self._scores, kernel_options=tiles or None, **more)

    def _mask(self, device: torch.device, train: bool) -> Any:
        from torch.nn.attention.flex_attention import noop_mask

        masked, full = [], []
        for one in self.layouts:
            own = np.repeat(np.arange(one.rows), one.row_lengths)
            partial = one.partial(one.mask) if one.mask else (own == one.indices) & one.causal
            masked.append((own[partial], one.indices[partial]))
            full.append((own[~partial], one.indices[~partial]))
        tables: list[Tensor | None] = [*self._tables(masked, full, device)]
        columns, full_columns = (
            [_transposed(*one) for one in entries] for entries in (masked, full)
        )
        tables += self._tables(columns, full_columns, device) if train else (None,) * 4
        mod: Any = causal_mask_mod if self.causal else noop_mask
        if (mask := self.layouts[0].mask) is not None:
            mod = interval_mask_mod(mask, np.arange(mask.tokens), device)
        return _block_mask((self.seq_len, self.seq_len), tables, self.block, mod)

    def _tables(
        self, masked: Sequence[Entries], full: Sequence[Entries], device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return blocks per row (1, H, R) and indices (1, H, R, W), int32: masked, then full.

        The CUDA kernels of torch 2.11 read the indices of full blocks with strides and width of the
        masked ones. So a row of one storage has both. A view may reach into the next numbers, which
        are beyond its counts; on a CPU it is R wide, as the lowering there expects.
        """
        rows, heads = self.layouts[0].rows, len(masked)
        counts = [
            np.stack([np.bincount(own, minlength=rows) for own, _ in entries]).astype(np.int32)
            for entries in (masked, full)
        ]
        widths = [max(1, int(count.max())) for count in counts]
        starts = 0, widths[0] + -widths[0] % ALIGNED_INDICES
        step = starts[1] + widths[1]
        table_size = heads * rows * step
        width = rows if device.type == "cpu" else max(widths)
        storage = np.zeros(table_size + width, dtype=np.int32)
        table = storage[:table_size].reshape(heads, rows, step)
        for entries, count, start in zip((masked, full), counts, starts, strict=True):
            for head, (_, indices) in enumerate(entries):
                own = table[head, :, start : start + int(count.max())]
                own[np.arange(own.shape[1]) < count[head][:, None]] = indices
        numbers = torch.from_numpy(storage).to(device)
        tables: list[Tensor] = []
        for count, start in zip(counts, starts, strict=True):
            tables.append(torch.from_numpy(count).to(device)[None])
            shape, strides = (1, heads, rows, width), (0, rows * step, step, 1)
            tables.append(numbers.as_strided(shape, strides, start))
        return tuple(tables)


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


def _transposed(own: Ints, indices: NDArray[np.int32]) -> Entries:
    order = np.argsort(indices, kind="stable")
    return indices[order].astype(np.int64), own[order].astype(np.int32)
