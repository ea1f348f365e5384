"""A memory budget on a GPU is exact to 1 %, and the check is not part of it."""

import pytest

from longseq_bench.core.model import Trial
from longseq_bench.launchers.local import LocalLauncher
from tests.trials import complete, passed, run_trial

pytestmark = pytest.mark.cuda

TOKENS = 2**20
AMPLE = 16 * 2**30


@pytest.fixture(scope="module")
def trial(launcher: LocalLauncher) -> Trial:
    """A trial of 4 GiB of q, k, v and output."""
    options = {"sparsity": 0.999, "kernel": "triton"}
    return complete(
        launcher, "block-sparse", TOKENS, options, device="cuda", heads=8, head_dim=64,
        dtype="bfloat16", threads=None, memory_budget=AMPLE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def needed(launcher: LocalLauncher, trial: Trial) -> int:
    """Bytes that the trial needs: its tensors, and what is outside torch's allocator."""
    outcome = passed(run_trial(launcher, trial))
    names = ("device_memory", "reserved", "peak")
    device, reserved, peak = (outcome.largest(name) or 0 for name in names)
    assert device >= reserved >= peak >= 4 * TOKENS * 8 * 64 * 2
    return int(peak + device - reserved)


def test_the_budget_is_exact_to_one_percent(
    launcher: LocalLauncher, trial: Trial, needed: int
) -> None:
    """The check of the larger one needs more than the pass itself."""
    outcome = passed(run_trial(launcher, trial.replace(memory_budget=int(needed / 0.99))))
    assert outcome.samples("max_error")
    outcome = run_trial(launcher, trial.replace(memory_budget=int(needed / 1.01)))
    assert (outcome.status, outcome.phase in ("inputs", "plan", "forward")) == ("oom", True)
    # it leaves the device to the next
    passed(run_trial(launcher, trial))
