"""The Hilbert walk: a bijection for every length, unit steps in whole squares."""

import numpy as np
import pytest

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.patterns import dilated
from longseq_bench.patterns.dilated import hilbert_order


@pytest.mark.parametrize("lengths", [range(1, 301), (1023, 1025, 4095, 65_537, 999_983)])
def test_the_map_is_a_permutation(lengths: range | tuple[int, ...]) -> None:
    """Fault 6."""
    for n in lengths:
        assert np.array_equal(np.sort(hilbert_order(n)), np.arange(n)), n


@pytest.mark.parametrize(("n", "side"), [(5, 4), (1000, 32), (4097, 128)])
def test_the_walk_is_that_of_the_square_without_what_lies_beyond(n: int, side: int) -> None:
    whole = hilbert_order(side**2)
    assert np.array_equal(hilbert_order(n), whole[whole < n])


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 64, 256])
def test_whole_squares_are_walked_in_unit_steps(side: int) -> None:
    row, column = np.divmod(hilbert_order(side * side), side)
    assert (np.abs(np.diff(row)) + np.abs(np.diff(column)) == 1).all()


def test_a_grid_too_large_for_int32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dilated, "MAX_SIDE", 4)
    assert len(hilbert_order(16)) == 16
    with pytest.raises(UnsupportedError, match="16 tokens at most, not 17"):
        hilbert_order(17)
