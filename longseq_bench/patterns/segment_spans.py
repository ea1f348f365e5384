"""LongNet's segments and rates as spans, along the sequence or along a walk through it.

Between two neighbouring segment ends (of any pair), a query's sets depend only on its offset modulo
the least common multiple of the rates. Queries with the same offset are a tile, and their keys of
each pair are one strided run without a mask. This also holds along a permuted walk.

For a causal walk each pair has its own index, in which the tokens of every set are sorted, so that
hidden keys come last.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.dilated import DilationRule
from longseq_bench.patterns.spans import Spans

TILE = 128

Ints = NDArray[np.int64]
Set = tuple[int, int, int]
"""Segment, rate, offset."""


@dataclass(frozen=True, eq=False)
class SortedPermutation:
    """A walk with the tokens of every set sorted.

    queries (N,): token of each query step.  keys (pairs * N,): token of each key step, grouped by
    pair, then by segment, then by offset.
    """

    queries: NDArray[np.int32]
    keys: NDArray[np.int32]


def classes(rule: DilationRule) -> list[tuple[tuple[Set, ...], list[int]]]:
    """Return the distinct sets that heads use, with their heads."""
    found: dict[tuple[Set, ...], list[int]] = {}
    for head in range(rule.heads):
        sets = tuple((w, r, head % r) for w, r in rule.pairs_of_head(head))
        found.setdefault(sets, []).append(head)
    return list(found.items())


def segment_spans(
    seq_len: int, sets: Sequence[Set], causal: bool, sorted_by: DilationRule | None = None
) -> Spans:
    """Return the spans of heads that use these sets, in steps of the walk.

    causal: keys after a tile's last query are left out.
    sorted_by: the rule of a walk sorted by `sort_walk`; steps then refer to the sorted walk.
    """
    used = [(w, r) for w, r, _ in sets] if sorted_by is None else unique_pairs(sorted_by)
    least = math.lcm(*(rate for _, rate in used))
    cells = _cells(seq_len, [w for w, _ in used])
    start, stop, place = _places(cells, least)
    count = np.minimum(-(-(stop - start) // least), TILE)
    tile = np.arange(len(start))
    runs = []
    for number, (segment, rate, offset) in enumerate(sets):
        own = tile[(start % segment) % rate == offset]
        first = start[own] // segment * segment
        total = np.minimum(first + segment, seq_len) - first
        members = -(-(total - offset) // rate)
        if sorted_by is None:
            last = start[own] + (count[own] - 1) * least
            seen = (last - first - offset) // rate + 1 if causal else members
            begin, step = first + offset, rate
        else:
            at = used.index((segment, rate)) * seq_len
            begin, step, seen = at + first + _before(total, rate, offset), 1, members
        runs.append((own, begin, seen, np.full(len(own), step), np.full(len(own), number)))
    tiles, begins, counts, steps, numbers = (np.concatenate(x) for x in zip(*runs, strict=True))
    order = np.lexsort((numbers, tiles))
    per_tile = np.bincount(tiles, minlength=len(start))
    steps_of = start if sorted_by is None else place
    return Spans(
        steps_of.astype(np.int32),
        count.astype(np.int32),
        np.concatenate(([0], np.cumsum(per_tile))).astype(np.int64),
        begins[order].astype(np.int32),
        counts[order].astype(np.int32),
        steps[order].astype(np.int32),
        least if sorted_by is None else 1,
    )


def sort_walk(order: NDArray[np.int32], rule: DilationRule) -> SortedPermutation:
    """Sort the tokens of a walk (N,) within every set of every pair."""
    n = len(order)
    pairs = unique_pairs(rule)
    keys = np.empty(len(pairs) * n, dtype=np.int32)
    for i, (segment, rate) in enumerate(pairs):
        _sort_sets(order, [*range(0, n, segment), n], rate, keys[i * n : (i + 1) * n])
    return SortedPermutation(sort_queries(order, rule), keys)


def sort_queries(order: NDArray[np.int32], rule: DilationRule) -> NDArray[np.int32]:
    """Sort the tokens of a walk (N,) that share an offset between neighbouring segment ends."""
    queries = np.empty(len(order), dtype=np.int32)
    ends = _cells(len(order), [w for w, _ in unique_pairs(rule)])
    _sort_sets(order, ends.tolist(), math.lcm(*rule.dilation), queries)
    return queries


def unique_pairs(rule: DilationRule) -> list[tuple[int, int]]:
    """Return each (segment, rate) once, in order."""
    return list(dict.fromkeys(zip(rule.segments, rule.dilation, strict=True)))


def _sort_sets(
    order: NDArray[np.int32], ends: Sequence[int], rate: int, out: NDArray[np.int32]
) -> None:
    for start, stop in itertools.pairwise(ends):
        at = start
        for offset in range(min(rate, stop - start)):
            members = np.sort(order[start + offset : stop : rate])
            out[at : at + len(members)] = members
            at += len(members)


def _cells(seq_len: int, segments: Sequence[int]) -> Ints:
    """Return the ends of all segments, from 0 to the end of the sequence."""
    ends = [np.arange(0, seq_len, w, dtype=np.int64) for w in sorted(set(segments))]
    return np.unique(np.concatenate([*ends, [seq_len]]))


def _places(cells: Ints, least: int) -> tuple[Ints, Ints, Ints]:
    """Return the first query of each tile, the end of its cell, its start in the sorted walk."""
    sizes = np.diff(cells)
    cell = np.repeat(np.arange(len(sizes)), np.minimum(sizes, least))
    place = np.arange(len(cell)) - np.searchsorted(cell, cell)
    members = -(-(sizes[cell] - place) // least)
    tiles = -(-members // TILE)
    of = np.repeat(np.arange(len(cell)), tiles)
    within = np.arange(len(of)) - np.searchsorted(of, of)
    start = cells[cell[of]] + place[of] + within * TILE * least
    sorted_at = cells[cell[of]] + _before(sizes[cell[of]], least, place[of]) + within * TILE
    return start, cells[cell[of] + 1], sorted_at


def _before(total: Ints, rate: int, offset: Ints | int) -> Ints:
    """Count members of smaller offsets among `total` steps: the sum of ceil((total - o) / rate)."""
    whole, rest = np.divmod(total, rate)
    before: Ints = offset * whole + np.minimum(offset, rest)
    return before
