"""Tiles of dilated segments, along the sequence or along a walk through it.

walk  the order in which segments are cut: a permutation of the tokens, or the sequence itself
step  an index into the walk
set   the tokens of a segment at one offset modulo the rate; they see each other

Segments that lie in a block of rows and in the keys at hand are one piece of a tiling: their sets
are rows of the batch, and heads have offsets of their own, by strides alone. On one rank a block of
q, k and v is gathered along a permutation first. There each set is sorted if the mask is causal,
which a softmax allows, so that its causal part is a lower triangle; so each pair has its own order.
Ranks hold one order, so they gather sorted sets. A set that is cut is a piece of its own.

Example: segment 8, rate 2, offset 0, causal, along the sequence. The set is 0 2 4 6. With the rows
4 ... 7 the set has two pieces: queries 4 6 with keys 0 2, and the triangle of 4 6 with 4 6.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.tiles import Block, BlockAttention, computed
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import KVPair
from longseq_bench.distributed.token_order import TokenOrder, causal_tiles
from longseq_bench.kernels import tiling
from longseq_bench.kernels.base import Queries
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.tiling import Piece, RowBlock
from longseq_bench.meta_mode import device_for
from longseq_bench.patterns.dilated import DilatedSegment
from longseq_bench.patterns.spans import sort_sets


class SegmentTiles:
    """Row blocks of few tokens.

    walk: token of each step, where several ranks have sorted sets; None: sets are in order.
    """

    walk: NDArray[np.int32] | None = None

    def __init__(self, w: Workload, segments: tuple[DilatedSegment, ...]) -> None:
        self._seq_len, self._causal, self._group = w.seq_len, w.causal, w.heads // w.kv_heads
        self._segments, self._period = segments, math.lcm(*(pair.segment for pair in segments))
        self._orders: list[tuple[Tensor | None, tuple[DilatedSegment, ...]]] = [(None, segments)]

    def follow(self, walk: NDArray[np.int32], device: str) -> None:
        """Gather q, k and v along a walk on one rank, by index tensors on the device."""
        self._orders = []
        for pairs in [(pair,) for pair in self._segments] if self._causal else [self._segments]:
            starts, order = range(0, len(walk), pairs[0].segment), walk
            if self._causal:
                order = sort_sets(walk, starts, pairs[0].rate)
            index = torch.from_numpy(order.astype(np.int64)).to(device_for(device))
            self._orders.append((index, pairs))

    def are_whole(self, rows: int) -> bool:
        """Return True if blocks of so many rows cut no segment."""
        return rows == self._seq_len or rows % self._period == 0

    def rows_of_a_block(self, max_rows: int) -> int:
        """Return the rows of a block on one rank: whole segments, as many as max_rows hold.

        Along the sequence a longer segment is cut; along a permutation it is one block.
        """
        whole = self._period
        if self._orders[0][0] is None:
            whole = min(whole, max_rows)
        return min(whole * max(1, max_rows // whole), self._seq_len)

    def blocks(
        self, heads: slice, own: range, queries: range, keys: range, max_rows: int
    ) -> Iterator[RowBlock]:
        """Yield the row blocks of queries at some steps of the walk with keys at other steps.

        q, k and v are in the order of the walk, unless it is followed. Row indices are into `own`,
        the steps that this rank holds; key indices are into `keys`, the steps of any rank.
        """
        for start in range(queries.start, queries.stop, max_rows):
            rows = range(start, min(start + max_rows, queries.stop))
            for order, pairs in self._orders:
                index = _view(rows, own) if order is None else order[start : rows.stop]
                seen = keys if order is None else rows
                if pieces := tuple(self._pieces(pairs, heads, rows, seen)):
                    yield RowBlock(index, heads, pieces, order is not None)

    def reach(self, order: TokenOrder) -> int:
        """Return by how many ranks at most a rank is apart from one that shares a segment with it.

        order: contiguous steps of the walk.
        """
        runs = [order.runs(rank)[0] for rank in range(order.ranks)]
        starts, lasts = np.array([run.start for run in runs]), np.array([run[-1] for run in runs])
        farthest = 0
        for size in {pair.segment for pair in self._segments}:
            ends = np.minimum((lasts // size + 1) * size, self._seq_len) - 1
            owners = np.searchsorted(starts, ends, side="right") - 1
            farthest = max(farthest, int((owners - np.arange(order.ranks)).max()))
        return farthest

    def _pieces(
        self, pairs: Sequence[DilatedSegment], heads: slice, rows: range, keys: range
    ) -> Iterator[Piece]:
        """Yield the pieces of pairs: queries at steps `rows` with keys at steps `keys`."""
        both = range(max(rows.start, keys.start), min(rows.stop, keys.stop))
        for pair in pairs:
            size, touched = pair.segment, _touched(pair.segment, rows, keys)
            starts = np.array(touched, dtype=np.int64) * size
            stops = np.minimum(starts + size, self._seq_len)
            whole = (starts >= both.start) & (stops <= both.stop)
            for length in np.unique((stops - starts)[whole]).tolist():  # the last may be short
                own = starts[whole & (stops - starts == length)]
                group = self._group if self.walk is None else 0
                for offset, set_heads, shift in pair.calls(heads, length, group):
                    if self.walk is None:
                        first = range(own[0] + offset, own[0] + length, pair.rate)
                        views, sets = (_view(first, rows), _view(first, keys)), len(own)
                        yield Piece(*views, set_heads, self._causal, None, sets, size, shift)
                        continue
                    steps = own[:, None] + np.arange(offset, length, pair.rate)
                    ascending = np.argsort(self.walk[steps], axis=1)
                    steps = np.take_along_axis(steps, ascending, axis=1)
                    places = [torch.from_numpy(steps - run.start) for run in (rows, keys)]
                    yield Piece(places[0], places[1], set_heads, causal=True)
            for start, stop in zip(starts[~whole].tolist(), stops[~whole].tolist(), strict=True):
                for offset, set_heads, _ in pair.calls(heads, stop - start):
                    of_set = range(start + offset, stop, pair.rate)
                    q_steps, k_steps = (_steps_in(run, of_set) for run in (rows, keys))
                    if q_steps and k_steps:
                        yield from self._cut_set(rows, keys, q_steps, k_steps, set_heads)

    def _cut_set(
        self, rows: range, keys: range, q_steps: range, k_steps: range, heads: slice
    ) -> Iterator[Piece]:
        """Yield the pieces of one set: its steps in `rows` with its steps in `keys`."""
        if not self._causal:
            yield Piece(_view(q_steps, rows), _view(k_steps, keys), heads)
        elif self.walk is None:
            for tile in causal_tiles(q_steps, k_steps):
                queries, tile_keys = q_steps[tile.rows], k_steps[tile.keys]
                yield Piece(_view(queries, rows), _view(tile_keys, keys), heads, tile.causal)
        else:
            # along a permutation keys of a set can come before and after a query
            q_tokens, k_tokens = (self.walk[s.start : s.stop : s.step] for s in (q_steps, k_steps))
            mask = torch.from_numpy(k_tokens[None, :] <= q_tokens[:, None])
            if mask.any():
                partial_mask = None if mask.all() else mask
                yield Piece(_view(q_steps, rows), _view(k_steps, keys), heads, mask=partial_mask)


def _touched(size: int, rows: range, keys: range) -> range:
    first = max(rows.start, keys.start) // size
    return range(first, min(rows.stop - 1, keys.stop - 1) // size + 1)


def _steps_in(run: range, steps: range) -> range:
    """Return the steps that are in a run: range(4, 99, 3) in range(10, 20) is range(10, 20, 3)."""
    first = steps.start + max(0, -(-(run.start - steps.start) // steps.step)) * steps.step
    return range(first, min(steps.stop, run.stop), steps.step)


def _view(steps: range, run: range) -> slice:
    """Return the indices of steps in a run: range(10, 20, 3) in range(8, 24) is slice(2, 12, 3)."""
    return slice(steps.start - run.start, steps.stop - run.start, steps.step)


@dataclass(frozen=True)
class SegmentBlocks(BlockAttention):
    """BlockAttention in tiles of sets, for each sequence of the batch."""

    group: Group
    exact: ExactKernel
    tiles: Callable[[Block], Iterable[RowBlock]]

    @override
    def forward(self, q: Tensor, kv: KVPair, block: Block, out: Tensor, lse: Tensor) -> None:
        for tile in computed(self.group, self.tiles(block)):
            for q_one, k, v, *sums in zip(
                *(torch.split(t, 1) for t in (q, *kv, out, lse)), strict=True
            ):
                tiling.merge(self.exact, q_one, (k, v), tile, *sums)

    @override
    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        for tile in computed(self.group, self.tiles(block)):
            tensors = (torch.split(t, 1) for t in (*queries, *kv, dq, *dkv))
            for grad_out, q, out, lse, k, v, dq_one, *sums in zip(*tensors, strict=True):
                own = grad_out, q, out, lse
                tiling.add_gradients(self.exact, own, (k, v), tile, dq_one, (sums[0], sums[1]))
