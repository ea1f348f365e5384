"""Spans cut to the queries and keys that are at hand see the same pairs."""

import itertools

import numpy as np
import pytest

from longseq_bench.attention.sparse.segment_blocks import cut_keys, cut_queries
from longseq_bench.kernels.spans_reference import tiles_of
from longseq_bench.patterns.segment_spans import segment_spans
from longseq_bench.patterns.spans import Spans

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
