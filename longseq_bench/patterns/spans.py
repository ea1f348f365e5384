"""Spans: tiles of queries and the runs of keys that each tile sees; the input of sparse kernels.

A step is a place in a list of tokens: the sequence, or an index that the kernel gets with the spans
(such as a walk).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.dilated import DilationRule, TokenSet
from longseq_bench.patterns.visible_keys import VisibleKeys


@dataclass(frozen=True, eq=False)
class Spans:
    """Tiles of queries and their runs of keys.

    Tile t has queries at steps tile_start[t] + s * tile_step for s < tile_count[t]. It sees the
    runs r = runs[t] ... runs[t + 1] - 1; run r has keys at steps start[r] + s * step[r] for
    s < count[r]. A key in two runs of a tile counts twice.

    tile_start, tile_count (tiles,), start, count, step (runs,) int32; runs (tiles + 1,) int64.
    step None: 1 for all.
    """

    tile_start: NDArray[np.int32]
    tile_count: NDArray[np.int32]
    runs: NDArray[np.int64]
    start: NDArray[np.int32]
    count: NDArray[np.int32]
    step: NDArray[np.int32] | None = None
    tile_step: int = 1


def spans_of(layout: BlockLayout) -> Spans:
    """Return the rows of a layout as tiles; each kept block is a run."""
    block, sizes = np.int32(layout.block), layout.block_sizes.astype(np.int32)
    rows = np.arange(layout.rows, dtype=np.int32) * block
    return Spans(rows, sizes, layout.indptr, layout.indices * block, sizes[layout.indices])


def ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> Ints:
    """Return counts[i] numbers from starts[i] on: starts 10 50, counts 2 3 give 10 11 50 51 52."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers: Ints = np.repeat(starts, counts) + within
    return numbers


# ---- spans of exact attention under a mask -------------------------------------------------------

TILE = 128
"""Queries of a tile: a program of the compiled kernels takes as many."""


def masked_spans(visible: VisibleKeys) -> Spans:
    """Return tiles of queries, each with a run of keys, of which some pairs need the mask.

    It reaches from the first key of the tile's first query to the last one of its last query.
    """
    start = np.arange(0, visible.tokens, TILE)
    count = np.minimum(TILE, visible.tokens - start)
    first, stop = visible.first(start), visible.stop(start + count - 1)
    return Spans(
        start.astype(np.int32),
        count.astype(np.int32),
        np.arange(len(start) + 1),
        first.astype(np.int32),
        (stop - first).astype(np.int32),
    )


def heads_by_sets(rule: DilationRule) -> dict[tuple[TokenSet, ...], list[int]]:
    """Return the heads that use the same sets, for each combination in use."""
    found: dict[tuple[TokenSet, ...], list[int]] = {}
    for head in range(rule.heads):
        found.setdefault(rule.sets_of_head(head), []).append(head)
    return found


def segment_spans(
    seq_len: int, sets: Sequence[TokenSet], causal: bool, sorted_by: DilationRule | None = None
) -> Spans:
    """Return the spans of heads that use these sets, in steps of the walk.

    causal: keys after a tile's last query are left out.
    sorted_by: the rule of a walk sorted by `sort_walk`; steps then refer to the sorted walk.
    """
    pairs = [(w, r) for w, r, _ in sets] if sorted_by is None else unique_pairs(sorted_by)
    period = math.lcm(*(rate for _, rate in pairs))
    tile_start, next_boundary = _periodic_tiles(_boundaries(seq_len, pairs), period)
    tile_count = np.minimum(-(-(next_boundary - tile_start) // period), TILE)
    runs = []
    for segment, rate, offset in sets:
        tiles = np.flatnonzero((tile_start % segment) % rate == offset)
        begin = tile_start[tiles] // segment * segment
        size = np.minimum(begin + segment, seq_len) - begin
        first, count = begin + offset, -(-(size - offset) // rate)
        if sorted_by is not None:
            first += pairs.index((segment, rate)) * seq_len
        elif causal:
            last_query = tile_start[tiles] + (tile_count[tiles] - 1) * period
            count = (last_query - begin - offset) // rate + 1
        runs.append(np.array((tiles, first, count, np.full(len(tiles), rate))))
    tile, first_keys, key_counts, key_steps = np.concatenate(runs, axis=1)
    order = np.argsort(tile, kind="stable")
    runs_per_tile = np.bincount(tile, minlength=len(tile_start))
    return Spans(
        tile_start=tile_start.astype(np.int32),
        tile_count=tile_count.astype(np.int32),
        runs=np.concatenate(([0], np.cumsum(runs_per_tile))).astype(np.int64),
        start=first_keys[order].astype(np.int32),
        count=key_counts[order].astype(np.int32),
        step=key_steps[order].astype(np.int32),
        tile_step=period,
    )


def sort_walk(
    walk: NDArray[np.int32], rule: DilationRule
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sort the tokens of a walk (N,) within every set; return the tokens of query and key steps.

    queries (N,): sorted in each stretch of steps between ends of segments, by offset modulo the
    period. keys (pairs * N,): sorted for each pair, one after the other.
    """
    n, pairs = len(walk), unique_pairs(rule)
    keys = [sort_sets(walk, range(0, n, segment), rate) for segment, rate in pairs]
    stretches = _boundaries(n, pairs)[:-1]
    return sort_sets(walk, stretches.tolist(), math.lcm(*rule.dilation)), np.concatenate(keys)


def unique_pairs(rule: DilationRule) -> list[tuple[int, int]]:
    """Return each (segment, rate) once, in order."""
    return list(dict.fromkeys(zip(rule.segments, rule.dilation, strict=True)))


def sort_sets(walk: NDArray[np.int32], starts: Sequence[int], rate: int) -> NDArray[np.int32]:
    """Return a walk whose tokens ascend in each set, at the places that the set has in the walk.

    starts: of segments or stretches.
    """
    order = walk.copy()
    for start, stop in itertools.pairwise([*starts, len(walk)]):
        for offset in range(min(rate, stop - start)):
            order[start + offset : stop : rate].sort()
    return order


def _boundaries(seq_len: int, pairs: Sequence[tuple[int, int]]) -> Ints:
    """Return the starts of all segments and the end of the sequence, ascending."""
    starts = [np.arange(0, seq_len, segment, dtype=np.int64) for segment in {w for w, _ in pairs}]
    return np.unique(np.concatenate([*starts, [seq_len]]))


def _periodic_tiles(boundaries: Ints, period: int) -> tuple[Ints, Ints]:
    """Return for each tile its first query and the next boundary.

    A group is the steps of a stretch with the same offset modulo the period. It is cut into tiles.
    """
    stretch_sizes = np.diff(boundaries)
    # stretch, offset, group_size: one entry for each group
    stretch = np.repeat(np.arange(len(stretch_sizes)), np.minimum(stretch_sizes, period))
    offset = np.arange(len(stretch)) - np.searchsorted(stretch, stretch)
    group_size = -(-(stretch_sizes[stretch] - offset) // period)
    # from here on: one entry for each tile of each group
    group = np.repeat(np.arange(len(stretch)), -(-group_size // TILE))
    index_in_group = np.arange(len(group)) - np.searchsorted(group, group)
    stretch, offset = stretch[group], offset[group]
    return boundaries[stretch] + offset + index_in_group * TILE * period, boundaries[stretch + 1]
