"""The Hilbert walk: a bijection for every length, unit steps in whole squares."""

import numpy as np
import pytest

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.patterns import dilated
from longseq_bench.patterns.dilated import grid_side, hilbert_order


@pytest.mark.parametrize("lengths", [range(1, 301), (1023, 1025, 4095, 65_537, 999_983)])
def test_the_map_is_a_permutation(lengths: range | tuple[int, ...]) -> None:
    """Fault 6."""
    for n in lengths:
        assert np.array_equal(np.sort(hilbert_order(n)), np.arange(n)), n


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 64, 256])
def test_whole_squares_are_walked_in_unit_steps(side: int) -> None:
    row, column = np.divmod(hilbert_order(side * side), side)
    assert (np.abs(np.diff(row)) + np.abs(np.diff(column)) == 1).all()


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


@pytest.mark.parametrize("n", [1, 5, 1000, 4097])
def test_the_walk_equals_one_built_step_by_step(n: int) -> None:
    assert hilbert_order(n).tolist() == [p for p in walk_by_digits(grid_side(n)) if p < n]


def test_a_grid_too_large_for_int32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dilated, "MAX_SIDE", 4)
    assert len(hilbert_order(16)) == 16
    with pytest.raises(UnsupportedError, match="16 tokens at most, not 17"):
        hilbert_order(17)
