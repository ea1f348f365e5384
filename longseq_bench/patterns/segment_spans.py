"""LongNet's segments and rates as spans, along the sequence or along a walk through it.

A walk is the order in which segments are cut, and a step an index into it. A set are the tokens of
a segment at one offset modulo the rate. Between two neighbouring segment ends (of any pair), the
sets of a query depend only on its offset modulo the least common multiple of the rates, the period.
Queries with the same offset are a tile, and their keys of each pair are one strided run without a
mask. This also holds along a permuted walk.

For a causal walk each pair has its own index, in which the tokens of every set are sorted, so that
hidden keys come last.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.dilated import DilationRule, TokenSet
from longseq_bench.patterns.spans import Spans

TILE = 128

Ints = NDArray[np.int64]


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
    used = [(w, r) for w, r, _ in sets] if sorted_by is None else unique_pairs(sorted_by)
    period = math.lcm(*(rate for _, rate in used))
    start, stop, sorted_start = _tiles(_segment_ends(seq_len, used), period)
    count = np.minimum(-(-(stop - start) // period), TILE)
    tile = np.arange(len(start))
    runs = []
    for number, (segment, rate, offset) in enumerate(sets):
        own = tile[(start % segment) % rate == offset]
        first = start[own] // segment * segment
        total = np.minimum(first + segment, seq_len) - first
        members = -(-(total - offset) // rate)
        if sorted_by is None:
            last = start[own] + (count[own] - 1) * period
            seen = (last - first - offset) // rate + 1 if causal else members
            begin, step = first + offset, rate
        else:
            index = used.index((segment, rate)) * seq_len
            begin, step, seen = index + first + _sorted_before(total, rate, offset), 1, members
        runs.append((own, begin, seen, np.full(len(own), step), np.full(len(own), number)))
    tiles, begins, counts, steps, numbers = (np.concatenate(x) for x in zip(*runs, strict=True))
    order = np.lexsort((numbers, tiles))
    per_tile = np.bincount(tiles, minlength=len(start))
    return Spans(
        (start if sorted_by is None else sorted_start).astype(np.int32),
        count.astype(np.int32),
        np.concatenate(([0], np.cumsum(per_tile))).astype(np.int64),
        begins[order].astype(np.int32),
        counts[order].astype(np.int32),
        steps[order].astype(np.int32),
        period if sorted_by is None else 1,
    )


def sort_walk(
    walk: NDArray[np.int32], rule: DilationRule
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sort the tokens of a walk (N,) within every set; return the tokens of query and key steps.

    queries (N,): between neighbouring segment ends, grouped by offset modulo the period.
    keys (pairs * N,): grouped by pair, then by segment, then by offset.
    """
    n, pairs = len(walk), unique_pairs(rule)
    queries, keys = np.empty(n, dtype=np.int32), np.empty((len(pairs), n), dtype=np.int32)
    _sort_sets(walk, _segment_ends(n, pairs).tolist(), math.lcm(*rule.dilation), queries)
    for (segment, rate), of_pair in zip(pairs, keys, strict=True):
        _sort_sets(walk, [*range(0, n, segment), n], rate, of_pair)
    return queries, keys.reshape(-1)


def unique_pairs(rule: DilationRule) -> list[tuple[int, int]]:
    """Return each (segment, rate) once, in order."""
    return list(dict.fromkeys(zip(rule.segments, rule.dilation, strict=True)))


def _sort_sets(
    walk: NDArray[np.int32], ends: Sequence[int], rate: int, out: NDArray[np.int32]
) -> None:
    """Fill `out` with the tokens of each offset modulo `rate` between two ends, sorted."""
    for start, stop in itertools.pairwise(ends):
        filled = start
        for offset in range(min(rate, stop - start)):
            members = np.sort(walk[start + offset : stop : rate])
            out[filled : filled + len(members)] = members
            filled += len(members)


def _segment_ends(seq_len: int, pairs: Sequence[tuple[int, int]]) -> Ints:
    """Return the ends of all segments, from 0 to the end of the sequence."""
    ends = [np.arange(0, seq_len, segment, dtype=np.int64) for segment in {w for w, _ in pairs}]
    return np.unique(np.concatenate([*ends, [seq_len]]))


def _tiles(ends: Ints, period: int) -> tuple[Ints, Ints, Ints]:
    """Return for each tile its first query, the segment end after it, and its start if sorted.

    Queries between two ends with the same offset modulo the period are cut into tiles.
    """
    sizes = np.diff(ends)
    # one entry for each offset after each end
    after = np.repeat(np.arange(len(sizes)), np.minimum(sizes, period))
    offset = np.arange(len(after)) - np.searchsorted(after, after)
    members = -(-(sizes[after] - offset) // period)
    tiles = -(-members // TILE)
    # one entry for each tile of each offset
    of = np.repeat(np.arange(len(after)), tiles)
    within = np.arange(len(of)) - np.searchsorted(of, of)
    after, offset = after[of], offset[of]
    start = ends[after] + offset + within * TILE * period
    before = _sorted_before(sizes[after], period, offset)
    return start, ends[after + 1], ends[after] + before + within * TILE


def _sorted_before(total: Ints, rate: int, offset: Ints | int) -> Ints:
    """Count members of smaller offsets among `total` steps: the sum of ceil((total - o) / rate)."""
    whole, rest = np.divmod(total, rate)
    before: Ints = offset * whole + np.minimum(offset, rest)
    return before
