"""Which rank holds which rows: all as many, and what each way is for."""

from typing import get_args

import numpy as np
import pytest

from longseq_bench.patterns.blocks import make_layout
from longseq_bench.patterns.placement import Placement, place_rows

WAYS = get_args(Placement)


def work(rows: int = 64, pattern: str = "local-window") -> np.ndarray:
    return make_layout(pattern, rows * 16, 16, 0.8, causal=True).row_lengths


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [7, 64, 101])
def test_every_rank_holds_as_many_rows(how: Placement, ranks: int, rows: int) -> None:
    held = np.bincount(place_rows(how, work(rows), ranks, 2), minlength=ranks)
    assert held.sum() == rows
    assert held.max() - held.min() <= (2 if how == "hierarchical" else 1)


def test_neighbours_stay_together_on_a_node() -> None:
    owners = place_rows("node-local", work(), 4, 4)
    assert (np.diff(owners) >= 0).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_work_is_even_where_it_is_dealt(ranks: int) -> None:
    """Causal rows keep more and more blocks: in runs the last rank has most."""
    of_row = work()

    def spread(how: Placement) -> float:
        held = np.bincount(place_rows(how, of_row, ranks, ranks), weights=of_row)
        return float(held.max() / held.min())

    assert spread("load-balanced") < 1.1
    assert spread("hierarchical") < 1.1
    assert spread("node-local") > 1.5


def test_nodes_hold_runs_and_deal_them() -> None:
    of_row = work()
    owners = place_rows("hierarchical", of_row, 4, 2)
    nodes = owners // 2
    assert (np.diff(nodes) >= 0).all()
    for node in (0, 1):
        held = [of_row[owners == rank].sum() for rank in (2 * node, 2 * node + 1)]
        assert max(held) < 1.1 * min(held)
        assert (np.diff(owners[nodes == node]) < 0).any()
