"""The number of kernel calls of a pass on a GPU, where small calls take as long as large ones."""

import pytest

from benchmarks.launches import GOALS, count


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_ring_makes_few_calls_on_a_gpu(ranks: int) -> None:
    """The tiles of a CPU, which are small for its caches, would make thousands."""
    found = count("ring", 2**20, ranks, "forward")
    assert 2 * ranks <= found <= GOALS["ring", 2**20, ranks]
    assert count("ring", 2**20, ranks, "forward", "cpu") > 10 * found


@pytest.mark.parametrize("name", ["dilated", "hilbert"])
def test_segments_are_the_batch_of_a_call(name: str) -> None:
    """One call for the heads of an offset, in blocks of rows as long as the longest segment."""
    assert count(name, 2**18, 1, "forward") == 8 * (1 + 4 + 8) <= GOALS[name, 2**18, 1]
