"""Segments over ranks: spans cut to the keys at hand, and how far along the ranks they reach."""

import itertools
import random
from time import process_time

import numpy as np
import pytest

from longseq_bench.attention.sparse.segments import SegmentTiles, cut_keys, cut_queries
from longseq_bench.distributed.token_order import TokenOrder
from longseq_bench.kernels.spans_reference import tiles_of
from longseq_bench.patterns.dilated import DilatedSegment
from longseq_bench.patterns.spans import Spans, segment_spans

TOKENS = 100
SETS = [((24, 1, 0), (60, 3, 1)), ((100, 7, 2),), ((8, 2, 1), (50, 5, 0))]


def pairs_of(spans: Spans, q_offset: int = 0, k_offset: int = 0) -> set[tuple[int, int]]:
    """Return the visible pairs; each may occur once, because sets of one size don't overlap."""
    found = [
        (int(q) + q_offset, int(k) + k_offset)
        for queries, keys, _ in tiles_of(spans)
        for q, k in itertools.product(queries, keys)
    ]
    return set(found)


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (range(100), range(100)),
        (range(30, 70), range(50, 90)),
        (range(1, 2), range(33)),
        (range(90, 100), range(7)),
    ],
)
def test_cut_spans_see_the_pairs_inside(
    sets: tuple[tuple[int, int, int], ...], rows: range, keys: range
) -> None:
    whole = segment_spans(TOKENS, sets, False)
    own = cut_queries(whole, rows)
    cut = cut_keys(own, keys)
    expected = {(q, k) for q, k in pairs_of(whole) if q in rows and k in keys}
    assert pairs_of(cut, rows.start, keys.start) == expected
    assert np.all(np.diff(cut.runs) > 0)
    assert np.all(cut.count > 0)


def test_a_share_of_the_rows_keeps_their_numbers() -> None:
    whole = segment_spans(TOKENS, SETS[0], False)
    share = cut_queries(whole, range(40, 60), 0)
    assert pairs_of(share) == {(q, k) for q, k in pairs_of(whole) if 40 <= q < 60}


def tiles(tokens: int, *segments: int) -> SegmentTiles:
    return SegmentTiles(tokens, tuple(DilatedSegment(s, 1, range(1)) for s in segments), True)


def share_a_segment(first: range, second: range, segments: list[int]) -> bool:
    return any({i // s for i in first} & {i // s for i in second} for s in segments)


def test_the_reach_is_that_of_the_ranks_that_share_a_segment() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        ranks = draw.randint(1, 7)
        tokens = draw.randint(ranks, 40)
        segments = [draw.randint(1, tokens + 3) for _ in range(draw.randint(1, 3))]
        order = TokenOrder("contiguous", tokens, ranks)
        runs = [order.runs(rank)[0] for rank in range(ranks)]
        expected = max(
            high - low
            for low in range(ranks)
            for high in range(low, ranks)
            if low == high or share_a_segment(runs[low], runs[high], segments)
        )
        assert tiles(tokens, *segments).reach(order) == expected
        seen.add(expected)
    assert seen == set(range(7))


def test_the_reach_of_thousands_of_ranks_is_found_at_once() -> None:
    """Each pair of ranks was compared: 1,024 ranks took half a minute."""
    order = TokenOrder("contiguous", 2**30, 2**13)
    start_s = process_time()
    assert tiles(2**30, 2**10, 2**20).reach(order) == 7
    assert process_time() - start_s < 3
