"""Segments and rates as spans: every query in one tile, and exactly the pairs of the rule."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.patterns.dilated import DilationRule, hilbert_order
from longseq_bench.patterns.spans import Spans, heads_by_sets, segment_spans, sort_walk
from tests.spans import tiles_of

pairs = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 6)), min_size=1, max_size=3)


def count_pairs(spans: Spans, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return how often each token sees each other in the spans, (N, N); each is in one tile."""
    n = len(queries)
    found, tiles = np.zeros((n, n), dtype=np.int64), np.zeros(n, dtype=np.int64)
    for q, k, _ in tiles_of(spans):
        tiles[queries[q]] += 1
        np.add.at(found, (queries[q][:, None], keys[k][None, :]), 1)
    assert (tiles == 1).all()
    return found


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 500),
    pairs=pairs,
    heads=st.integers(3, 6),
    mix=st.sampled_from(["softmax", "groups"]),
    causal=st.booleans(),
    permuted=st.booleans(),
)
def test_spans_are_the_rule(
    n: int, pairs: list[tuple[int, int]], heads: int, mix: str, causal: bool, permuted: bool
) -> None:
    segments, rates = zip(*pairs, strict=True)
    rule = DilationRule(segments, rates, heads, mix)
    order = hilbert_order(n) if permuted else np.arange(n, dtype=np.int32)
    step_of = np.empty_like(order)
    step_of[order] = np.arange(n, dtype=np.int32)
    sort, at = permuted and causal, np.arange(n)
    queries, keys = order, order
    if sort:
        queries, keys = sort_walk(order, rule)
    covered = []
    for sets, own in heads_by_sets(rule).items():
        spans = segment_spans(n, sets, causal and not permuted, rule if sort else None)
        found = count_pairs(spans, queries, keys)
        if causal:
            found *= at[None, :] <= at[:, None]
        for head in own:
            covered.append(head)
            assert (found == rule.multiplicity(at, at, head, causal, step_of)).all()
    assert sorted(covered) == list(range(heads))
