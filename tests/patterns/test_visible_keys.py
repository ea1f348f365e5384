"""The keys that each query sees, by mask."""

import numpy as np
import pytest

from longseq_bench.core.masks import parse_mask
from longseq_bench.patterns.visible_keys import VisibleKeys

TOKENS = 30
MASKS = (
    "full", "causal", "sliding-window:7", "prefix:10", "documents:10,5,15",
    "full-documents:10,5,15",
)  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [range(30), range(1, 30, 4), [2, 3, 28], []], ids=str)
def test_pairs_are_the_visible_keys_of_all_queries(mask: str, queries: list[int]) -> None:
    visible, asked = VisibleKeys(parse_mask(mask), TOKENS), np.array(queries, dtype=np.int64)
    assert visible.pairs(asked) == visible.multiplicity(asked, np.arange(TOKENS)).sum()
