"""The Hilbert walk: a bijection for every length, unit steps in whole squares."""

import numpy as np
import pytest

from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.patterns import hilbert
from longseq_bench.patterns.hilbert import MAX_SIDE, grid_side, hilbert_order


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
    """This distinguishes Hilbert's curve from other walks in unit steps."""
    order = hilbert_order(side * side)
    for size in (2, side // 2):
        for patch in order.reshape(-1, size * size):
            for axis in np.divmod(patch, side):
                assert axis.max() - axis.min() == size - 1


def test_the_first_steps_are_those_of_the_curve() -> None:
    assert hilbert_order(4).tolist() in ([0, 1, 3, 2], [0, 2, 3, 1])
    assert hilbert_order(1).tolist() == [0]


def test_a_shorter_walk_keeps_the_order_of_the_full_one() -> None:
    whole = hilbert_order(256)
    assert hilbert_order(200).tolist() == [p for p in whole.tolist() if p < 200]


def test_the_side_is_the_smallest_power_of_two_that_is_enough() -> None:
    sides = {1: 1, 2: 2, 4: 2, 5: 4, 16: 4, 17: 8, 64: 8, 65: 16, 2**20: 1024, 2**20 + 1: 2048}
    assert {n: grid_side(n) for n in sides} == sides


def walk_by_digits(side: int) -> list[int]:
    """The walk over a square, each step from the base-4 digits of its number alone."""
    found = []
    for step in range(side * side):
        row = col = 0
        half = 1
        while half < side:
            quarter = step // half**2 % 4
            row, col = (
                (col, row),
                (row, col + half),
                (row + half, col + half),
                (2 * half - 1 - col, half - 1 - row),
            )[quarter]
            half *= 2
        found.append(row * side + col)
    return found


@pytest.mark.parametrize("n", [1, 5, 100, 1000, 4096, 4097])
def test_the_walk_equals_one_built_step_by_step(n: int) -> None:
    assert hilbert_order(n).tolist() == [p for p in walk_by_digits(grid_side(n)) if p < n]


def test_zero_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1 token, not 0"):
        hilbert_order(0)


def test_cells_of_the_largest_grid_fit_int32() -> None:
    last = np.iinfo(np.int32).max
    assert MAX_SIDE**2 - 1 <= last < (2 * MAX_SIDE) ** 2 - 1


def test_a_grid_too_large_for_int32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hilbert, "MAX_SIDE", 4)
    assert len(hilbert_order(16)) == 16
    with pytest.raises(UnsupportedError, match="16 tokens at most, not 17"):
        hilbert_order(17)
