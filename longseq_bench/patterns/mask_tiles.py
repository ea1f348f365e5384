"""Tiles of a mask for kernels that know rectangles, causal triangles and tensors of visible pairs.

Queries are cut where a document begins and where a causal mask enters or leaves the keys; of the
keys of such a piece all queries see the middle. What is left of it and right of it is a triangle,
or a small tile with a tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.visible_keys import Ints, VisibleKeys, count_before

MASKED_ROWS = 1024
"""Queries of a tile with a tensor, at most: its size grows with the square."""


@dataclass(frozen=True, eq=False)
class MaskTile:
    """Queries and the keys that they see, both as indices into their runs.

    causal: the lower triangle of a square.  visible: (queries, keys), True where a query sees a
    key; None for all pairs or a triangle.
    """

    rows: slice
    keys: slice
    causal: bool = False
    visible: NDArray[np.bool_] | None = None


def mask_tiles(
    mask: VisibleKeys, rows: range, keys: range, max_rows: int, max_keys: int
) -> Iterator[list[MaskTile]]:
    """Yield the tiles of each piece of queries at positions `rows` with keys at positions `keys`.

    Both ranges may have steps. Tiles have at most max_rows queries; rectangles at most max_keys
    keys. Queries that see none of the keys are left out.
    """
    positions = np.arange(rows.start, rows.stop, rows.step)
    first, stop = (
        count_before(ends, keys) for ends in (mask.first(positions), mask.stop(positions))
    )
    cuts = _cuts(first, stop, len(keys), mask.mask.has_documents, min(max_rows, MASKED_ROWS))
    for a, b in pairwise(cuts):
        if tiles := list(_piece(a, b, first[a:b], stop[a:b], max_keys)):
            yield tiles


def _cuts(first: Ints, stop: Ints, keys: int, documents: bool, step: int) -> list[int]:
    """Return the ends of pieces of queries, ascending, the first and the last included."""
    rows = len(first)
    inner = np.searchsorted(stop, (0, keys - 1), "right")  # a causal mask enters and leaves
    begins = np.flatnonzero(np.diff(first)) + 1 if documents else np.empty(0, dtype=np.int64)
    ends = np.unique(np.clip([0, rows, *inner, *begins], 0, rows))
    steps = (np.arange(a, b, step) for a, b in pairwise(ends))
    return [*np.concatenate([*steps, [rows]]).tolist()] if rows else []


def _piece(a: int, b: int, first: Ints, stop: Ints, max_keys: int) -> Iterator[MaskTile]:
    """Yield the tiles of queries a ... b - 1, whose keys are first ... stop - 1."""
    rows, last = slice(a, b), int(stop[-1])
    low, high = int(first[-1]), int(stop[0])  # all queries see the keys between
    if last <= first[0]:
        return
    if low > high:
        yield MaskTile(rows, slice(int(first[0]), last), visible=_visible(first, stop, last))
        return
    is_triangle = high > low and bool((stop == high + np.arange(b - a)).all())
    triangle = high - 1 if is_triangle else high
    if low > first[0]:
        keys = slice(int(first[0]), low)
        yield MaskTile(rows, keys, visible=_visible(first, np.full_like(stop, low), low))
    for start in range(low, triangle, max_keys):
        yield MaskTile(rows, slice(start, min(start + max_keys, triangle)))
    if is_triangle:
        yield MaskTile(rows, slice(triangle, last), causal=True)
    elif last > high:
        yield MaskTile(
            rows, slice(high, last), visible=_visible(np.full_like(first, high), stop, last)
        )


def _visible(first: Ints, stop: Ints, last: int) -> NDArray[np.bool_]:
    """Return the pairs of queries with the keys from the first query's first to `last` - 1."""
    keys = np.arange(int(first[0]), last)
    visible: NDArray[np.bool_] = (keys >= first[:, None]) & (keys < stop[:, None])
    return visible
