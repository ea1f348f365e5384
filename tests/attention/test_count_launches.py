"""Launches of a pass on a GPU: a call from the host takes as long as a short kernel."""

import importlib.util

import pytest

from benchmarks.count_launches import CASES

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed"
)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_starts_few_kernels_and_copies_nothing(name: str) -> None:
    """Nothing waits for the device either: without data, that would fail."""
    count, *shape, goal = CASES[name]
    found = count(*shape)
    assert 1 <= found.launches.total() <= goal, found.launches
    assert found.copies == 0
