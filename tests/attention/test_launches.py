"""The number of launches of a pass on a GPU, where short ones take as long as the host needs."""

import importlib.util

import pytest

from benchmarks import launches
from longseq_bench.core.model import Mode

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed"
)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, id=f"{case.name}-{mode}")
        for case in launches.CASES
        for mode in case.goals
    ],
)
def test_a_pass_launches_little_and_copies_nothing(case: launches.Case, mode: Mode) -> None:
    """Nothing waits for the device either: without data, that would fail."""
    found = case.count(mode)
    assert 0 < found.launches.total() <= case.goals[mode], found.launches
    assert found.copies == 0
    # two pieces of a row need no float32 sums; on many ranks own keys are copied to be sent
    few_pieces = case.ranks == 1 and mode != "train" and (case.name, case.causal) != ("ring", True)
    assert found.launches["copy_"] == 0 or not few_pieces
