"""The transpose of a layout: for each key block, who sees it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import PATTERNS, make_layout


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(PATTERNS)),
    st.integers(1, 60),
    st.integers(1, 9),
    st.floats(0, 0.95),
    st.booleans(),
)
def test_it_lists_who_sees_each_key_block(
    pattern: str, seq_len: int, block: int, sparsity: float, causal: bool
) -> None:
    made = make_layout(pattern, seq_len, block, sparsity, causal)
    indptr, queries = made.transpose()
    for key in range(made.rows):
        seen_by = [i for i in range(made.rows) if key in made.row(i)]
        assert queries[indptr[key] : indptr[key + 1]].tolist() == seen_by
    assert queries.dtype == np.int32
    assert len(indptr) == made.rows + 1


def test_a_key_block_that_nobody_sees_keeps_its_place() -> None:
    made = BlockLayout(24, 8, False, np.arange(4), np.zeros(3, dtype=np.int32))
    indptr, queries = made.transpose()
    assert indptr.tolist() == [0, 3, 3, 3]
    assert queries.tolist() == [0, 1, 2]
