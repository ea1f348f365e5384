"""Top blocks by score: equal to a full sort of each row; ties are kept by index."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.attention.sparse.block_sparse_adaptive import top_layout
from longseq_bench.core.errors import UserError
from longseq_bench.patterns.block_layout import BlockLayout


def layout_of(scores: np.ndarray, sparsity: float, causal: bool, block: int = 4) -> BlockLayout:
    """Return the layout of a full table of scores; the last block is short."""
    tokens = len(scores) * block - (block > 1)
    return top_layout(lambda a, b: torch.from_numpy(scores[a:b]), tokens, block, sparsity, causal)


def sorted_rows(scores: np.ndarray, sparsity: float, causal: bool) -> list[list[int]]:
    """The definition, with Python's sort."""
    rows = []
    for i in range(len(scores)):
        visible = range(i + 1 if causal else len(scores))
        count = max(1, round((1 - sparsity) * len(visible)))
        by_score = sorted(visible, key=lambda j: (j != i, -scores[i, j], j))
        rows.append(sorted(by_score[:count]))
    return rows


VALUES = [0.0, -0.0, 1.0, 1.5, -2.0, -2.5, float("inf"), float("-inf"), 1e-42, -1e-42]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.floats(0, 0.99), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_it_equals_a_full_sort(
    rows: int, sparsity: float, causal: bool, tied: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    scores = draw.standard_normal((rows, rows)).astype(np.float32)
    if tied:
        scores = draw.choice(np.array(VALUES, dtype=np.float32), (rows, rows))
    layout = layout_of(scores, sparsity, causal)
    assert [layout.row(i).tolist() for i in range(rows)] == sorted_rows(scores, sparsity, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_result_is_the_same_in_chunks_requested_in_order(causal: bool) -> None:
    scores = np.random.default_rng(2).integers(0, 5, (50, 50)).astype(np.float32)
    whole = layout_of(scores, 0.8, causal)
    requested: list[tuple[int, int]] = []

    def some(start: int, stop: int) -> torch.Tensor:
        requested.append((start, stop))
        return torch.from_numpy(scores[start:stop])

    cut = top_layout(some, 199, 4, 0.8, causal, chunk=400)
    assert np.array_equal(whole.indices, cut.indices)
    assert requested == [(a, min(a + 8, 50)) for a in range(0, 50, 8)]


def test_a_visible_nan_is_refused() -> None:
    scores = np.zeros((20, 20), dtype=np.float32)
    scores[7, 9] = np.nan
    with pytest.raises(UserError, match="score of query block 7 for key block 9 is NaN"):
        layout_of(scores, 0.5, False)
    assert layout_of(scores, 0.5, True).rows == 20
    scores[7, 7] = -np.float32(np.nan)
    with pytest.raises(UserError, match="score of query block 7 for key block 7 is NaN"):
        layout_of(scores, 0.5, True)
