"""A memory budget on a GPU is exact to 1 %, and the check is not part of it."""

import pytest

from longseq_bench.core.model import Outcome, Trial
from longseq_bench.launchers.local import LocalLauncher
from tests.trials import complete, run_trial

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
    device, reserved = (outcome.largest(name) for name in ("device_memory", "reserved"))
    peak = outcome.largest("peak")
    assert device
    assert reserved
    assert peak
    assert peak >= 4 * TOKENS * 8 * 64 * 2
    return int(peak + device - reserved)


def passed(outcome: Outcome) -> Outcome:
    assert (outcome.status, outcome.reason) == ("ok", None)
    return outcome


def test_a_pass_at_99_percent_of_the_budget_passes_its_check(
    launcher: LocalLauncher, trial: Trial, needed: int
) -> None:
    """A check under the cap needs more than the pass itself."""
    outcome = passed(run_trial(launcher, trial.replace(memory_budget=int(needed / 0.99))))
    assert outcome.samples("max_error")


def test_a_pass_at_101_percent_of_the_budget_is_out_of_memory(
    launcher: LocalLauncher, trial: Trial, needed: int
) -> None:
    outcome = run_trial(launcher, trial.replace(memory_budget=int(needed / 1.01)))
    assert outcome.status == "oom", outcome.reason
    assert outcome.phase in ("inputs", "plan", "forward")


def test_an_out_of_memory_trial_leaves_the_device_to_the_next(
    launcher: LocalLauncher, trial: Trial
) -> None:
    assert run_trial(launcher, trial.replace(memory_budget=2 * 2**30)).status == "oom"
    passed(run_trial(launcher, trial))
