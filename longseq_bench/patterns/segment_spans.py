"""LongNet's segments and rates as spans, along the sequence or along a walk through it.

Between two neighbouring ends of segments, of whichever pair, a query's sets depend only on its
place modulo the least common multiple of the rates. So queries that have the same place are a tile,
and what they see of each pair is one strided run, with no mask.

Along a permuted walk that holds too. Where causality counts there, each pair gets an index of its
own in which the tokens of every set stand sorted: what a query must not see are then the last ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.dilated import Rule
from longseq_bench.patterns.spans import Spans

TILE = 128

Ints = NDArray[np.int64]
Set = tuple[int, int, int]
"""Segment, rate, offset."""


@dataclass(frozen=True, eq=False)
class Sorted:
    """A walk with the tokens of every set sorted.

    queries (N,): token of each query step.  keys (pairs * N,): token of each key step, those of a
    pair together, in them those of a segment, in those the offsets one after the other.
    """

    queries: NDArray[np.int32]
    keys: NDArray[np.int32]


def classes(rule: Rule) -> list[tuple[tuple[Set, ...], list[int]]]:
    """The sets that heads use, with the heads that use the same."""
    found: dict[tuple[Set, ...], list[int]] = {}
    for head in range(rule.heads):
        sets = tuple((w, r, head % r) for w, r in rule.pairs_of_head(head))
        found.setdefault(sets, []).append(head)
    return list(found.items())


def segment_spans(
    seq_len: int, sets: Sequence[Set], causal: bool, sorted_by: Rule | None = None
) -> Spans:
    """What heads that use these sets see.

    Steps are those of the walk, and, causal, keys beyond a tile's last query are left out.
    sorted_by: the rule of a walk that was sorted by `sort_walk`, whose steps are then meant.
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


def sort_walk(order: NDArray[np.int32], rule: Rule) -> Sorted:
    """The tokens of a walk (N,), sorted in every set of every pair."""
    n = len(order)
    pairs = unique_pairs(rule)
    keys = np.empty(len(pairs) * n, dtype=np.int32)
    for i, (segment, rate) in enumerate(pairs):
        _sort_sets(order, [*range(0, n, segment), n], rate, keys[i * n : (i + 1) * n])
    return Sorted(sort_queries(order, rule), keys)


def sort_queries(order: NDArray[np.int32], rule: Rule) -> NDArray[np.int32]:
    """The tokens of a walk (N,), sorted where they have the same place between ends of segments."""
    queries = np.empty(len(order), dtype=np.int32)
    ends = _cells(len(order), [w for w, _ in unique_pairs(rule)])
    _sort_sets(order, ends.tolist(), _least(rule), queries)
    return queries


def unique_pairs(rule: Rule) -> list[tuple[int, int]]:
    """Each (segment, rate) once, in order."""
    return list(dict.fromkeys(zip(rule.segments, rule.dilation, strict=True)))


def _least(rule: Rule) -> int:
    return math.lcm(*rule.dilation)


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
    """Ends of all segments, from 0 to the sequence's own."""
    ends = [np.arange(0, seq_len, w, dtype=np.int64) for w in sorted(set(segments))]
    return np.unique(np.concatenate([*ends, [seq_len]]))


def _places(cells: Ints, least: int) -> tuple[Ints, Ints, Ints]:
    """First query of each tile and the end of its cell, and where the tile's queries stand when
    those of a cell are sorted by place."""
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
    """Members of the offsets before one, among so many steps: ceil((total - o) / rate) summed."""
    whole, rest = np.divmod(total, rate)
    before: Ints = offset * whole + np.minimum(offset, rest)
    return before
