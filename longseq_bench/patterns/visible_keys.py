"""The interval of keys that each query of exact attention sees, by its mask (core/masks.py).

Neither end moves back from one query to the next, so the queries that see a key are an interval
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.masks import PREFIX, WINDOW, Mask
from longseq_bench.core.model import Workload
from longseq_bench.patterns import Ints, Tokens


class VisibleKeys:
    """The keys first(i) ... stop(i) - 1 that a query at position i sees, in `tokens` tokens."""

    def __init__(self, mask: Mask, tokens: int) -> None:
        self.mask, self.tokens = mask, tokens

    @cached_property
    def _bounds(self) -> Ints:
        """The first token of each document, and the end of the last one."""
        return np.concatenate(([0], np.cumsum(self.mask.document_lengths(self.tokens))))

    def first(self, queries: Ints) -> Ints:
        """Return the first key that each query sees, (queries,)."""
        if self.mask.kind == WINDOW:
            return np.maximum(queries - (self.mask.size - 1), 0)
        if self.mask.has_documents:
            return self._bounds[np.searchsorted(self._bounds, queries, "right") - 1]
        return np.zeros_like(queries)

    def stop(self, queries: Ints) -> Ints:
        """Return the key after the last one that each query sees, (queries,)."""
        if self.mask.is_causal:
            return queries + 1
        if self.mask.kind == PREFIX:
            return np.maximum(queries + 1, min(self.mask.size, self.tokens))
        if self.mask.has_documents:
            return self._bounds[np.searchsorted(self._bounds, queries, "right")]
        return np.full_like(queries, self.tokens)

    def first_query(self, keys: Ints) -> Ints:
        """Return the first query that sees each key, (keys,)."""
        if self.mask.kind == PREFIX:
            return np.where(keys < self.mask.size, 0, keys)
        return keys if self.mask.is_causal else self.first(keys)

    def stop_query(self, keys: Ints) -> Ints:
        """Return the query after the last one that sees each key, (keys,)."""
        if self.mask.kind == WINDOW:
            return np.minimum(keys + self.mask.size, self.tokens)
        if self.mask.has_documents:
            return self._bounds[np.searchsorted(self._bounds, keys, "right")]
        return np.full_like(keys, self.tokens)

    def multiplicity(self, queries: Ints, keys: Ints) -> NDArray[np.bool_]:
        """Return True where a query sees a key, (queries, keys), from positions."""
        first, stop = self.first(queries)[:, None], self.stop(queries)[:, None]
        visible: NDArray[np.bool_] = (keys >= first) & (keys < stop)
        return visible

    def pairs(self, queries: Tokens) -> int:
        """Return the number of keys that these queries see, added up."""
        if isinstance(queries, tuple):
            return sum(map(self._pairs_of_run, queries))
        return int((self.stop(queries) - self.first(queries)).sum())

    def _pairs_of_run(self, run: range) -> int:
        # without an array: a dry run asks this for many million queries
        if run.step == 1:
            before = partial(self.mask.pairs_before, tokens=self.tokens)
            return before(run.stop) - before(run.start)
        return self.pairs(np.arange(run.start, run.stop, run.step))


_visible_keys = lru_cache(maxsize=32)(VisibleKeys)


def visible_keys(workload: Workload) -> VisibleKeys:
    """Return the visible keys of a workload; the same object for equal masks and lengths."""
    return _visible_keys(workload.visibility, workload.seq_len)


# ---- tiles of a mask: rectangles, causal triangles, tensors of visible pairs ---------------------
# Queries are cut where a document begins and where a causal mask enters or leaves the keys; of the
# keys of such a piece all queries see the middle. What is left of it and right of it is a triangle,
# or a small tile with a tensor.

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
    # of each query, the keys of the run before its first one, and before the end of what it sees
    first, stop = (
        np.clip(-(-(ends - keys.start) // keys.step), 0, len(keys))
        for ends in (mask.first(positions), mask.stop(positions))
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

    def with_tensor(begin: int, end: int) -> MaskTile:
        keys = np.arange(begin, end)
        visible = (keys >= first[:, None]) & (keys < stop[:, None])
        return MaskTile(rows, slice(begin, end), visible=visible)

    rows, begin, last = slice(a, b), int(first[0]), int(stop[-1])
    low, high = int(first[-1]), int(stop[0])  # all queries see the keys between
    if last <= begin:
        return
    if low > high:
        yield with_tensor(begin, last)
        return
    is_triangle = high > low and bool((stop == high + np.arange(b - a)).all())
    triangle = high - 1 if is_triangle else high
    if low > begin:
        yield with_tensor(begin, low)
    for start in range(low, triangle, max_keys):
        yield MaskTile(rows, slice(start, min(start + max_keys, triangle)))
    if is_triangle:
        yield MaskTile(rows, slice(triangle, last), causal=True)
    elif last > high:
        yield with_tensor(high, last)
