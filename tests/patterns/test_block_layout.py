"""Compressed layouts: pairs, density and rows equal those of an enumerated table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.patterns.block_layout import BlockLayout


def layout(rows: list[list[int]], seq_len: int, block: int, causal: bool = False) -> BlockLayout:
    """A layout from lists of key blocks."""
    indptr = np.cumsum([0, *map(len, rows)])
    return BlockLayout(seq_len, block, causal, indptr, np.concatenate(rows).astype(np.int32))


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    block, seq_len = draw(st.integers(1, 9)), draw(st.integers(1, 60))
    causal = draw(st.booleans())
    count = -(-seq_len // block)
    rows = [
        sorted(draw(st.sets(st.integers(0, i if causal else count - 1), min_size=1)))
        for i in range(count)
    ]
    return layout(rows, seq_len, block, causal)


def table(one: BlockLayout) -> np.ndarray:
    """Return the visible pairs, token by token, without the layout's own methods."""
    visible = np.zeros((one.seq_len, one.seq_len), dtype=bool)
    for q in range(one.seq_len):
        row = q // one.block
        for j in one.indices[one.indptr[row] : one.indptr[row + 1]]:
            visible[q, j * one.block : (j + 1) * one.block] = True
        if one.causal:
            visible[q, q + 1 :] = False
    return visible


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_multiplicity_pairs_and_block_density_equal_enumeration(one: BlockLayout) -> None:
    visible, n = table(one), one.seq_len
    steps = np.arange(n)
    assert np.array_equal(one.multiplicity(steps, steps), visible)
    assert one.visible_pairs == visible.sum()
    blocks = one.rows * (one.rows + 1) / 2 if one.causal else one.rows**2
    assert one.block_density == pytest.approx(len(one.indices) / blocks)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_multiplicity_takes_any_positions_in_any_order(one: BlockLayout, draw) -> None:  # type: ignore[no-untyped-def]
    queries = np.array([draw.randrange(one.seq_len) for _ in range(7)])
    keys = np.array([draw.randrange(one.seq_len) for _ in range(5)])
    visible = table(one)[np.ix_(queries, keys)]
    assert np.array_equal(one.multiplicity(queries, keys), visible)
    may_see, seen = one.keys_seen(queries), np.flatnonzero(table(one)[queries].any(0))
    assert np.isin(seen, may_see).all()
    if not one.causal:
        assert np.array_equal(may_see, seen)
