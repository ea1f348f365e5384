"""Parts of the Hilbert walk on their own, and the lengths that have no walk."""

from __future__ import annotations

import numpy as np
import pytest

from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.patterns import hilbert
from longseq_bench.patterns.hilbert import (
    LARGEST_SIDE,
    grid_side,
    hilbert_order,
    hilbert_positions,
)


@pytest.mark.parametrize("n", [1, 5, 100, 1000, 4096, 4097])
def test_step_by_step_is_the_same_walk_as_by_doubling(n: int) -> None:
    side = grid_side(n)
    row, col = hilbert_positions(0, side * side, side)
    cell = row * side + col
    assert hilbert_order(n).tolist() == cell[cell < n].tolist()


def test_any_part_can_be_had_alone() -> None:
    row, col = hilbert_positions(1000, 1300, 64)
    assert np.array_equal(row * 64 + col, hilbert_order(64 * 64)[1000:1300])
    row, col = hilbert_positions(2**40 - 9, 2**40, 2**20)
    assert np.all(np.abs(np.diff(row)) + np.abs(np.diff(col)) == 1)


def test_no_tokens_have_no_walk() -> None:
    with pytest.raises(UserError, match="0 tokens"):
        hilbert_order(0)


def test_the_largest_grid_is_the_last_that_int32_can_number() -> None:
    last = np.iinfo(np.int32).max
    assert LARGEST_SIDE**2 - 1 <= last < (2 * LARGEST_SIDE) ** 2 - 1


def test_a_grid_too_large_to_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hilbert, "LARGEST_SIDE", 4)
    assert len(hilbert_order(16)) == 16
    with pytest.raises(UnsupportedError, match="16 tokens at most, not 17"):
        hilbert_order(17)
