"""Placement of rows on ranks: equal shares, and the purpose of each placement."""

from typing import get_args

import numpy as np
import pytest

from longseq_bench.patterns.block_layout import Placement, place_rows
from longseq_bench.patterns.blocks import make_layout

PLACEMENTS = get_args(Placement)


def work(rows: int = 64, pattern: str = "local-window") -> np.ndarray:
    return make_layout(pattern, rows * 16, 16, 0.8, causal=True).row_lengths


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [7, 64, 101])
def test_every_rank_has_equally_many_rows(placement: Placement, ranks: int, rows: int) -> None:
    loads = np.bincount(place_rows(placement, work(rows), ranks, 2), minlength=ranks)
    assert loads.sum() == rows
    assert loads.max() - loads.min() <= (2 if placement == "hierarchical" else 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_load_balanced_placements_spread_work_evenly(ranks: int) -> None:
    """Later causal rows keep more blocks, so with node-local the last rank has most."""
    of_row = work()

    def spread(placement: Placement) -> float:
        loads = np.bincount(place_rows(placement, of_row, ranks, ranks), weights=of_row)
        return float(loads.max() / loads.min())

    assert spread("load-balanced") < 1.1
    assert spread("hierarchical") < 1.1
    assert spread("node-local") > 1.5


def test_hierarchical_gives_runs_to_nodes_and_balances_inside() -> None:
    of_row = work()
    assert (np.diff(place_rows("node-local", of_row, 4, 4)) >= 0).all()
    owners = place_rows("hierarchical", of_row, 4, 2)
    nodes = owners // 2
    assert (np.diff(nodes) >= 0).all()
    for node in (0, 1):
        loads = [of_row[owners == rank].sum() for rank in (2 * node, 2 * node + 1)]
        assert max(loads) < 1.1 * min(loads)
        assert (np.diff(owners[nodes == node]) < 0).any()
