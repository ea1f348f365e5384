"""Tiles of segments and dilation, along the sequence or along a walk through it.

Within a segment of length w, the tokens at offset o modulo r see each other: they form a set. Along
the sequence a set is a range, so its queries and keys are strided views. Along a permutation it is
a list of positions; sorted by original position, its causal part is again a lower triangle, because
a softmax does not depend on the order of its keys. So no mask is needed.

The sets of a segment are sorted once and used by all row tiles of a super-segment, the shortest run
of the walk that the segments of every pair divide.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longseq_bench.distributed.token_order import causal_tiles
from longseq_bench.kernels.tiling import Index, Piece, RowBlock

Tokens = range | NDArray[np.int32]
"""Original positions, ascending."""


@dataclass(frozen=True)
class DilatedSegment:
    """One (segment, rate) with the heads that use it."""

    segment: int
    rate: int
    heads: range

    def offsets(self, heads: range) -> Iterator[tuple[int, slice]]:
        """Yield each offset with those of `heads` that have it: head h has offset h mod rate."""
        for offset in range(self.rate):
            first = heads.start + (offset - heads.start) % self.rate
            if first < heads.stop:
                yield offset, slice(first, heads.stop, self.rate)


@dataclass(frozen=True)
class TokenPermutation:
    """The order in which segments are cut: the sequence, or a permutation of it (`order`)."""

    seq_len: int
    order: NDArray[np.int32] | None = None

    def tokens(self, start: int, stop: int, step: int = 1) -> Tokens:
        """Return the original positions of some steps of the walk, ascending."""
        if self.order is None:
            return range(start, stop, step)
        return np.sort(self.order[start:stop:step])


def segment_tiles(
    walk: TokenPermutation, pairs: tuple[DilatedSegment, ...], heads: slice, causal: bool, tile: int
) -> Iterator[RowBlock]:
    """Yield row blocks of at most `tile` tokens for a run of query heads, on one rank."""
    size = super_segment(walk.seq_len, pairs)
    own = [
        (p, range(max(p.heads.start, heads.start), min(p.heads.stop, heads.stop))) for p in pairs
    ]
    for start in range(0, walk.seq_len, size):
        stop = min(start + size, walk.seq_len)
        members = walk.tokens(start, stop)
        sets = [s for pair, h in own for s in _sets(walk, pair, h, start, stop)]
        for at in range(0, len(members), tile):
            rows = members[at : at + tile]
            pieces = [p for tokens, h in sets for p in _pieces(rows, tokens, h, causal, tile)]
            yield RowBlock(_index(rows), heads, tuple(pieces))


def ring_tiles(
    walk: TokenPermutation,
    pairs: tuple[DilatedSegment, ...],
    head_runs: Iterable[slice],
    causal: bool,
    own: range,
    queries: range,
    keys: range,
    tile: int,
) -> Iterator[RowBlock]:
    """Yield what queries at some steps of a walk see of keys at other steps, of any rank.

    Queries and keys are in the order of the walk, so every set is a strided view. Causality needs a
    mask only along a permutation, where a set can be on both sides of a query. Row indices are into
    `own`, the steps that this rank holds; key indices are into `keys`.
    """
    for heads in head_runs:
        for start in range(queries.start, queries.stop, tile):
            rows = range(start, min(start + tile, queries.stop))
            pieces: list[Piece] = []
            for pair in pairs:
                run = range(max(pair.heads.start, heads.start), min(pair.heads.stop, heads.stop))
                for of_rows, seen, h in _ring_sets(pair, run, rows, keys):
                    pieces += _ring_pieces(walk, causal, rows, keys, of_rows, seen, h)
            if pieces:
                at = slice(rows.start - own.start, rows.stop - own.start)
                yield RowBlock(at, heads, tuple(pieces))


def share_a_segment(pairs: tuple[DilatedSegment, ...], first: range, second: range) -> bool:
    """Return True if any segment holds steps of both runs."""
    low, high = sorted((first, second), key=lambda r: r.start)
    return any((low.stop - 1) // p.segment == high.start // p.segment for p in pairs)


def _ring_sets(
    pair: DilatedSegment, heads: range, rows: range, keys: range
) -> Iterator[tuple[range, range, slice]]:
    """Yield steps of rows and of keys that see each other, with the heads for which they do."""
    first = max(rows.start, keys.start) // pair.segment
    last = min(rows.stop - 1, keys.stop - 1) // pair.segment
    for segment in range(first, last + 1):
        start, stop = segment * pair.segment, (segment + 1) * pair.segment
        for offset, own in pair.offsets(heads):
            of_rows, of_keys = (_steps(start + offset, stop, pair.rate, r) for r in (rows, keys))
            if len(of_rows) and len(of_keys):
                yield of_rows, of_keys, own


def _steps(start: int, stop: int, rate: int, among: range) -> range:
    """Return every rate-th step from start on that is in a run."""
    first = start + max(0, -(-(among.start - start) // rate)) * rate
    return range(first, min(stop, among.stop), rate)


def _ring_pieces(
    walk: TokenPermutation,
    causal: bool,
    rows: range,
    keys: range,
    queries: range,
    seen: range,
    heads: slice,
) -> Iterator[Piece]:
    if not causal:
        yield Piece(_strided(queries, rows), _strided(seen, keys), heads)
    elif walk.order is None:
        for tile in causal_tiles(queries, seen):
            q_steps, k_steps = queries[tile.rows], seen[tile.keys]
            yield Piece(_strided(q_steps, rows), _strided(k_steps, keys), heads, tile.causal)
    else:
        of_queries = torch.from_numpy(walk.order[queries.start : queries.stop : queries.step])
        of_keys = torch.from_numpy(walk.order[seen.start : seen.stop : seen.step])
        mask = of_keys[None, :] <= of_queries[:, None]
        if mask.any():
            needed = None if mask.all() else mask
            yield Piece(_strided(queries, rows), _strided(seen, keys), heads, mask=needed)


def _strided(steps: range, among: range) -> slice:
    return slice(steps.start - among.start, steps.stop - among.start, steps.step)


def super_segment(seq_len: int, pairs: tuple[DilatedSegment, ...]) -> int:
    """Return the shortest length that all segments divide, at most the sequence."""
    return min(seq_len, math.lcm(*(p.segment for p in pairs)))


def _sets(
    walk: TokenPermutation, pair: DilatedSegment, heads: range, start: int, stop: int
) -> Iterator[tuple[Tokens, slice]]:
    """Yield tokens of a super-segment that see each other, with the heads for which they do."""
    if not len(heads):
        return
    for segment in range(start, stop, pair.segment):
        end = min(segment + pair.segment, stop)
        for offset, own in pair.offsets(heads):
            if segment + offset < end:
                yield walk.tokens(segment + offset, end, pair.rate), own


def _pieces(rows: Tokens, tokens: Tokens, heads: slice, causal: bool, tile: int) -> Iterator[Piece]:
    """Yield what the rows of a block see of one set: the keys before them, and the triangle."""
    first = bisect_left(tokens, int(rows[0]))
    last = bisect_left(tokens, int(rows[-1]) + 1)
    if first >= last:
        return
    queries = _within(rows, tokens[first:last])
    seen = first if causal else len(tokens)
    step = seen if isinstance(tokens, range) else tile
    for at in range(0, seen, max(1, step)):
        yield Piece(queries, _index(tokens[at : min(at + step, seen)]), heads)
    if causal:
        yield Piece(queries, _index(tokens[first:last]), heads, causal=True)


def _within(rows: Tokens, tokens: Tokens) -> Index:
    """Return the indices of tokens among the rows of a block."""
    if isinstance(rows, range) and isinstance(tokens, range):
        return slice(tokens.start - rows.start, tokens.stop - rows.start, tokens.step)
    if len(rows) == len(tokens):
        return slice(None)
    return torch.from_numpy(np.searchsorted(np.asarray(rows), np.asarray(tokens)).astype(np.int64))


def _index(tokens: Tokens) -> Index:
    if isinstance(tokens, range):
        return slice(tokens.start, tokens.stop, tokens.step)
    return torch.from_numpy(np.ascontiguousarray(tokens)).long()
