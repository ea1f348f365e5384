"""Spans of exact attention under a mask: the keys that tiles of some queries see of some keys."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.spans import Spans
from longseq_bench.patterns.visible_keys import Ints, VisibleKeys, count_before

TILE = 128
"""Queries of a tile: a program of the compiled kernels takes as many."""


def masked_spans(
    visible: VisibleKeys, queries: Sequence[range], keys: Sequence[range], first_row: int = 0
) -> Spans:
    """Return tiles of queries and their runs of keys; tiles that see nothing are left out.

    queries, keys: runs of positions; the step of a token is its index in them, for queries counted
    from `first_row`. A tile lies in one run, and its runs of keys reach from the first key of its
    first query to the last one of its last query, so that some pairs need the mask.
    """
    start, count, first, stop = _tiles(visible, queries, first_row)
    tiles, run_start, run_count = [], [], []
    offset = 0
    for run in keys:
        low = count_before(first, run)
        high = count_before(stop, run)
        seen = np.flatnonzero(high > low)
        tiles.append(seen)
        run_start.append(offset + low[seen])
        run_count.append((high - low)[seen])
        offset += len(run)
    tile_of = np.concatenate([*tiles, np.empty(0, dtype=np.int64)])
    order = np.argsort(tile_of, kind="stable")
    per_tile = np.bincount(tile_of, minlength=len(start))
    kept = np.flatnonzero(per_tile)
    return Spans(
        start[kept].astype(np.int32),
        count[kept].astype(np.int32),
        np.concatenate(([0], np.cumsum(per_tile[kept]))).astype(np.int64),
        _joined(run_start)[order],
        _joined(run_count)[order],
    )


def _tiles(
    visible: VisibleKeys, queries: Sequence[range], offset: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return first index and length of each tile, its first key, and the one after its last."""
    starts, counts, firsts, stops = [], [], [], []
    for run in queries:
        begin = np.arange(0, len(run), TILE)
        count = np.minimum(TILE, len(run) - begin)
        starts.append(offset + begin)
        counts.append(count)
        firsts.append(visible.first(run.start + begin * run.step))
        stops.append(visible.stop(run.start + (begin + count - 1) * run.step))
        offset += len(run)
    start, count, first, stop = (np.concatenate(x) for x in (starts, counts, firsts, stops))
    return start, count, first, stop


def _joined(arrays: list[Ints]) -> NDArray[np.int32]:
    return np.concatenate([*arrays, np.empty(0, dtype=np.int64)]).astype(np.int32)
