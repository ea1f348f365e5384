"""LongNet's rule against a loop over all pairs of tokens, written from the definition."""

from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longseq_bench.core.errors import UserError
from longseq_bench.patterns.dilated import DilationRule


@st.composite
def rules(draw: st.DrawFn) -> DilationRule:
    pairs = draw(st.integers(1, 3))
    numbers = st.integers(1, 30)
    segments = tuple(draw(numbers) for _ in range(pairs))
    rates = tuple(draw(st.integers(1, 6)) for _ in range(pairs))
    mix = draw(st.sampled_from(["softmax", "groups"]))
    return DilationRule(segments, rates, draw(st.integers(pairs, 5)), mix)


def pair_of(rule: DilationRule, head: int) -> list[tuple[int, int]]:
    """Return the pairs (segment, rate) of a head: all, or that of its group of heads."""
    pairs = list(zip(rule.segments, rule.dilation, strict=True))
    return pairs if rule.mix == "softmax" else [pairs[head * len(pairs) // rule.heads]]


def times(rule: DilationRule, a: int, b: int, head: int) -> int:
    """Return how often step a sees step b."""
    return sum(
        a // w == b // w and a % w % r == head % r and b % w % r == head % r
        for w, r in pair_of(rule, head)
    )


def table(rule: DilationRule, n: int, causal: bool) -> np.ndarray:
    counts = [
        [[times(rule, a, b, h) * (b <= a or not causal) for b in range(n)] for a in range(n)]
        for h in range(rule.heads)
    ]
    return np.array(counts).reshape(rule.heads, n, n)


@settings(max_examples=60, deadline=None)
@given(rules(), st.integers(1, 40), st.booleans())
def test_counts_pairs_and_shares_equal_the_definition(
    rule: DilationRule, n: int, causal: bool
) -> None:
    expected, steps = table(rule, n, causal), np.arange(n)
    for head in range(rule.heads):
        assert np.array_equal(rule.multiplicity(steps, steps, head, causal), expected[head])
    assert rule.visible_pairs(n, causal) == expected.sum()
    uncovered = (expected.sum(-1) == 0).mean()
    assert rule.uncovered_share(n) == pytest.approx(uncovered, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(rules(), st.integers(1, 40), st.booleans(), st.randoms(use_true_random=False))
@example(DilationRule((16, 4), (1, 2), 2, "softmax"), 32, True, Random(0))
def test_segments_follow_a_walk_and_causality_the_sequence(rule, n, causal, draw) -> None:  # type: ignore[no-untyped-def]
    order = list(range(n))
    draw.shuffle(order)
    step_of = np.empty(n, dtype=np.int32)
    step_of[order] = np.arange(n)
    steps = np.arange(n)
    for head in range(rule.heads):
        got = rule.multiplicity(steps, steps, head, causal, step_of)
        for a in range(n):
            for b in range(n):
                count = times(rule, step_of[a], step_of[b], head)
                assert got[a, b] == (0 if causal and b > a else count)
        queries = np.array(draw.sample(range(n), min(n, 4)))
        seen = rule.multiplicity(queries, steps, head, False, step_of).any(0)
        expected = np.sort(step_of[np.flatnonzero(seen)])
        assert np.array_equal(rule.steps_seen(step_of[queries], head, n), expected)


def test_a_very_long_sequence_is_counted_by_its_period() -> None:
    assert DilationRule((1024, 2048), (2, 4), 8).uncovered_share(2**40) == 0.5
    assert DilationRule((1024,), (2,), 1).visible_pairs(2**40, False) == 2**30 * 512**2


def test_groups_count_uncovered_tokens() -> None:
    """Fault 9. Half of the heads have rate 2, so half of their tokens see nothing."""
    assert DilationRule((16, 64), (1, 2), 4, "groups").uncovered_share(640) == 0.25


@pytest.mark.parametrize(
    ("segments", "rates", "mix", "message"),
    [
        ((16, 32), (1,), "softmax", r"2 segments \(16, 32\) but 1 rates \(1,\)"),
        ((), (), "softmax", "0 segments"),
        ((16, 32, 64), (1, 2, 4), "groups", "3 pairs, 2 heads"),
    ],
)
def test_invalid_rules_are_refused(
    segments: tuple[int, ...], rates: tuple[int, ...], mix: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        DilationRule(segments, rates, 2, mix)
