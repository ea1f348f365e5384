"""Placement of rows on ranks: equal shares, and the purpose of each placement."""

from typing import get_args

import numpy as np
import pytest

from longseq_bench.patterns.block_layout import Placement, place_rows
from longseq_bench.patterns.blocks import make_layout

PLACEMENTS = get_args(Placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [64, 101])
def test_shares_are_even_and_load_balance_evens_the_work_too(
    placement: Placement, ranks: int, rows: int
) -> None:
    """Later causal rows keep more blocks, so with node-local the last rank has most."""
    work = make_layout("local-window", rows * 16, 16, 0.8, causal=True).row_lengths
    owners = place_rows(placement, work, ranks, ranks)
    counts = np.bincount(owners, minlength=ranks)
    assert counts.max() - counts.min() <= 1
    loads = np.bincount(owners, weights=work)
    assert (loads.max() / loads.min() < 1.1) == (placement != "node-local")


def test_hierarchical_gives_runs_to_nodes_and_balances_inside() -> None:
    work = make_layout("local-window", 1024, 16, 0.8, causal=True).row_lengths
    owners = place_rows("hierarchical", work, 4, 2)
    assert (np.diff(owners // 2) >= 0).all()
    one, other, *_ = np.bincount(owners, weights=work)
    assert max(one, other) < 1.1 * min(one, other)
