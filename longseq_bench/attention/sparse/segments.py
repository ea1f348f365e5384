"""Tiles of dilated segments, along the sequence or along a walk through it.

walk  the order in which segments are cut: a permutation of the tokens, or the sequence itself
step  an index into the walk
set   the tokens of a segment at one offset modulo the rate; they see each other

Segments that lie in the rows and the keys at hand are one piece: their sets are rows of the batch,
and heads have offsets of their own, by strides. On one rank no segment is cut, and along a
permutation rows are copied. Causal sets are sorted, which a softmax allows, so that each sees a
lower triangle; so each pair has its own order. Ranks hold one order, so they gather sorted sets. A
set that is cut is a piece of its own.

Example: segment 8, rate 2, offset 0, causal, along the sequence. The set is 0 2 4 6. With the rows
4 ... 7 the set has two pieces: queries 4 6 with keys 0 2, and the triangle of 4 6 with 4 6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.attention.tiles import TileSizes, head_rows, head_runs, whole_runs
from longseq_bench.core.model import Workload
from longseq_bench.distributed.token_order import TokenOrder, causal_tiles
from longseq_bench.kernels.tiling import ALL, Piece, take
from longseq_bench.meta_mode import device_for
from longseq_bench.patterns import Ints
from longseq_bench.patterns.dilated import DilatedSegment
from longseq_bench.patterns.spans import sort_sets

FEW_PAIRS = 4
"""Pairs at most whose results are summed in 16 bits: with 10 the largest error doubles."""


class SegmentTiles:
    """Pieces of the segments of each pair.

    walk: token of each step, where several ranks have sorted sets; None: sets are in order.
    """

    walk: NDArray[np.int32] | None = None

    def __init__(self, w: Workload, segments: tuple[DilatedSegment, ...]) -> None:
        self._workload, self._causal, self._group = w, w.causal, w.heads // w.kv_heads
        self._segments = segments
        self._orders: Sequence[Tensor | None] = [None] * len(segments)

    def follow(self, walk: NDArray[np.int32], device: str) -> None:
        """Take the rows of q, k and v along a walk on one rank, by index tensors on the device."""
        orders = [walk]
        if self._causal:
            of_pairs = [(range(0, len(walk), size), rate) for size, rate, _ in self._segments]
            orders = [sort_sets(walk, starts, rate) for starts, rate in of_pairs]
        found = [torch.from_numpy(o.astype(np.int64)).to(device_for(device)) for o in orders]
        self._orders = found * (len(self._segments) // len(found))

    def whole(self, sizes: TileSizes) -> Iterator[Piece]:
        """Yield pieces of whole segments on one rank, each as many as a tile has room for.

        A pair in which every head has every token comes first.
        """
        w, own = self._workload, range(self._workload.seq_len)
        has_all = [pair.rate == 1 and len(pair.heads) == w.heads for pair in self._segments]
        first = has_all.index(True) if any(has_all) else None
        for i in sorted(range(len(has_all)), key=lambda i: i != first):
            pair, order = self._segments[i], self._orders[i]
            rows, runs = self._cuts(pair, order, sizes, i == first and len(has_all) <= FEW_PAIRS)
            for heads, start in product(runs, own[::rows]):
                starts = np.arange(start, min(start + rows, w.seq_len), pair.segment)
                for piece in self._whole_segments(pair, heads, starts, own, own, order is not None):
                    index = None if order is None else _index(order, piece, pair.rate)
                    yield replace(piece, index=index, is_first=i == first)

    def _cuts(
        self, pair: DilatedSegment, order: Tensor | None, sizes: TileSizes, may_be_one: bool
    ) -> tuple[int, list[slice]]:
        """Return the rows and the heads of the calls for a pair."""
        w, seq_len, segment = self._workload, self._workload.seq_len, pair.segment
        is_one_piece = segment >= seq_len or seq_len % segment == 0
        every = whole_runs(w, sizes) if may_be_one and is_one_piece and w.batch == 1 else []
        if len(every) == 1 and order is None:
            return seq_len, every
        # each call is for one sequence; some kernels copy views with a step
        one = w.model_copy(update={"batch": 1})
        rate = max(1, pair.rate // 2) if order is None else pair.rate
        room = 0 if sizes.is_host else head_rows(one, seq_len, sizes) // self._group
        rows = min(max(1, max(sizes.rows, room) * rate // segment) * segment, seq_len)
        return rows, head_runs(one, -(-rows // rate), seq_len, sizes)

    def reach(self, order: TokenOrder) -> int:
        """Return by how many ranks at most a rank is apart from one that shares a segment with it.

        order: contiguous steps of the walk.
        """
        lasts = np.array([order.runs(rank)[0][-1] for rank in range(order.ranks)])
        sizes = {pair.segment for pair in self._segments}
        ends = (np.minimum((lasts // n + 1) * n, self._workload.seq_len) - 1 for n in sizes)
        return max(int((np.searchsorted(lasts, end) - range(order.ranks)).max()) for end in ends)

    def pieces(self, heads: slice, own: range, rows: range, keys: range) -> Iterator[Piece]:
        """Yield the pieces of queries at steps `rows` of the walk with keys at steps `keys`.

        q, k and v are in the order of the walk. Row indices are into `own`, the steps that this
        rank holds; key indices are into `keys`, the steps of any rank.
        """
        both = range(max(rows.start, keys.start), min(rows.stop, keys.stop))
        for pair in self._segments:
            size = pair.segment
            touched = range(both.start // size, (both.stop - 1) // size + 1)
            starts = np.array(touched, dtype=np.int64) * size
            stops = np.minimum(starts + size, self._workload.seq_len)
            whole = (starts >= both.start) & (stops <= both.stop)
            yield from self._whole_segments(pair, heads, starts[whole], own, keys)
            for start, stop in zip(starts[~whole].tolist(), stops[~whole].tolist(), strict=True):
                for offset, set_heads, _ in pair.calls(heads, stop - start):
                    of_set = range(start + offset, stop, pair.rate)
                    q_steps, k_steps = (_steps_in(run, of_set) for run in (rows, keys))
                    if q_steps and k_steps:
                        yield from self._cut_set(own, keys, q_steps, k_steps, set_heads)

    def _whole_segments(
        self, pair: DilatedSegment, heads: slice, starts: Ints, rows: range, keys: range,
        wraps: bool = False,
    ) -> Iterator[Piece]:  # fmt: skip
        """Yield the pieces of segments that start at these steps and lie in rows and keys."""
        lengths = np.minimum(starts + pair.segment, self._workload.seq_len) - starts
        for length in np.unique(lengths).tolist():  # the last may be short
            own = starts[lengths == length]
            # of gathered heads each has keys of its own
            group = self._group if self.walk is None and not (wraps and self._group > 1) else 0
            for offset, set_heads, shift in pair.calls(heads, length, group, wraps):
                if self.walk is None:
                    first = range(own[0] + offset, own[0] + length, pair.rate)
                    views, apart = (_view(first, rows), _view(first, keys)), pair.segment
                    yield Piece(*views, set_heads, self._causal, None, len(own), apart, shift)
                    continue
                steps = own[:, None] + np.arange(offset, length, pair.rate)
                ascending = np.argsort(self.walk[steps], axis=1)
                steps = np.take_along_axis(steps, ascending, axis=1)
                places = [torch.from_numpy(steps - run.start) for run in (rows, keys)]
                yield Piece(places[0], places[1], set_heads, causal=True, apart=1)

    def _cut_set(
        self, rows: range, keys: range, q_steps: range, k_steps: range, heads: slice
    ) -> Iterator[Piece]:
        """Yield the pieces of some steps of a set with some others."""
        if not self._causal:
            yield Piece(_view(q_steps, rows), _view(k_steps, keys), heads, apart=1)
        elif self.walk is None:
            for tile in causal_tiles(q_steps, k_steps):
                views = _view(q_steps[tile.rows], rows), _view(k_steps[tile.keys], keys)
                yield Piece(*views, heads, tile.causal, apart=1)
        else:
            # along a permutation keys of a set can come before and after a query
            q_tokens, k_tokens = (self.walk[s.start : s.stop : s.step] for s in (q_steps, k_steps))
            mask = torch.from_numpy(k_tokens[None, :] <= q_tokens[:, None])
            if mask.any():
                views = _view(q_steps, rows), _view(k_steps, keys)
                yield Piece(*views, heads, mask=None if mask.all() else mask, apart=1)


def _steps_in(run: range, steps: range) -> range:
    """Return the steps that are in a run: range(4, 99, 3) in range(10, 20) is range(10, 20, 3)."""
    first = steps.start + max(0, -(-(run.start - steps.start) // steps.step)) * steps.step
    return range(first, min(steps.stop, run.stop), steps.step)


def _view(steps: range, run: range) -> slice:
    """Return the indices of steps in a run: range(10, 20, 3) in range(8, 24) is slice(2, 12, 3)."""
    return slice(steps.start - run.start, steps.stop - run.start, steps.step)


def _index(order: Tensor, piece: Piece, rate: int) -> Tensor:
    """Return the tokens of the sets of a piece along an order, with a head for each offset."""
    heads = slice(piece.heads.start, min(piece.heads.stop, piece.heads.start + rate))
    places = order[None, None, :, None]
    return take(places, ALL, piece.rows, replace(piece, heads=heads))[..., 0]
