"""The number of launches of a pass on a GPU, where short ones take as long as the host needs."""

import pytest

from benchmarks import launches
from longseq_bench.core.model import Mode


@pytest.mark.parametrize("case", launches.CASES, ids=lambda case: case.name)
def test_a_forward_pass_launches_little_and_copies_nothing(case: launches.Case) -> None:
    found = case.count("forward")
    assert 0 < found.launches.total() <= case.goal
    assert found.copies == 0
    # two pieces of a row need no float32 sums; on many ranks own keys are copied to be sent
    assert case.ranks > 1 or found.launches["copy_"] == 0


@pytest.mark.parametrize(
    ("name", "mode", "calls"),
    [("dilated", "forward", 8), ("dilated", "train", 40), ("hilbert", "train", 70)],
)
def test_a_pair_is_one_call_of_some_heads(name: str, mode: Mode, calls: int) -> None:
    """All offsets of four heads: two runs of heads, two pairs, with a merge or sums for each."""
    found = launches.Case(name, 0, options=launches.PAIRS).count(mode)
    filled = sum(found.launches[name] for name in ("zeros_like", "new_zeros", "new_full"))
    assert found.launches["_scaled_dot_product_cudnn_attention"] == 4
    assert found.launches.total() - filled == calls
    assert found.copies == 0
