"""The Hilbert walk: a bijection for every length, unit steps in whole squares."""

from __future__ import annotations

import numpy as np
import pytest

from longseq_bench.patterns.hilbert import grid_side, hilbert_order


@pytest.mark.parametrize("lengths", [range(1, 301), (1023, 1025, 4095, 65_537, 999_983)])
def test_the_map_is_a_permutation(lengths: range | tuple[int, ...]) -> None:
    """Fault 6."""
    for n in lengths:
        assert np.array_equal(np.sort(hilbert_order(n)), np.arange(n)), n


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 64, 256])
def test_whole_squares_are_walked_in_unit_steps(side: int) -> None:
    row, column = np.divmod(hilbert_order(side * side), side)
    assert (np.abs(np.diff(row)) + np.abs(np.diff(column)) == 1).all()


@pytest.mark.parametrize("side", [4, 16, 64])
def test_a_run_of_a_square_length_is_a_square(side: int) -> None:
    """What makes it Hilbert's curve, and no other walk in unit steps."""
    order = hilbert_order(side * side)
    for size in (2, side // 2):
        for patch in order.reshape(-1, size * size):
            for axis in np.divmod(patch, side):
                assert axis.max() - axis.min() == size - 1


def test_the_first_steps_are_those_of_the_curve() -> None:
    assert hilbert_order(4).tolist() in ([0, 1, 3, 2], [0, 2, 3, 1])
    assert hilbert_order(1).tolist() == [0]


def test_a_cut_walk_keeps_the_order_of_the_whole() -> None:
    whole = hilbert_order(256)
    assert hilbert_order(200).tolist() == [p for p in whole.tolist() if p < 200]


def test_the_side_is_the_smallest_power_of_two_that_holds_it() -> None:
    sides = {1: 1, 2: 2, 4: 2, 5: 4, 16: 4, 17: 8, 64: 8, 65: 16, 2**20: 1024, 2**20 + 1: 2048}
    assert {n: grid_side(n) for n in sides} == sides
