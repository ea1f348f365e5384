"""A memory budget on a GPU is exact to 1 %, and neither the check nor others are part of it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from longseq_bench.core.model import Trial
from longseq_bench.launchers.local import LocalLauncher
from tests.trials import complete, passed, run_trial

pytestmark = pytest.mark.cuda

TOKENS = 2**20
AMPLE = 16 * 2**30
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


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
    names = ("outside_allocator", "reserved", "peak")
    outside, reserved, peak = (outcome.largest(name) or 0 for name in names)
    assert 2**27 < outside < 2**30
    assert reserved >= peak >= 4 * TOKENS * 8 * 64 * 2
    return int(peak + outside)


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


@contextmanager
def holder(gib: int) -> Iterator[None]:
    """Another process that holds memory of the GPU."""
    code = f"import torch; x = torch.empty({gib} << 28, device='cuda'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], **PIPES) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        yield
        process.communicate(b"\n", timeout=60)


def test_what_another_process_holds_does_not_count(
    launcher: LocalLauncher, trial: Trial, needed: int
) -> None:
    """It is named where it leaves less than the budget."""
    with holder(20):
        outcome = passed(run_trial(launcher, trial.replace(memory_budget=int(needed / 0.99))))
    outside, peak = (outcome.largest(name) or 0 for name in ("outside_allocator", "peak"))
    assert outside == pytest.approx(needed - peak, rel=0.1)
    free, total = torch.cuda.mem_get_info()
    with holder((free - needed) // 2**30 + 1):
        outcome = run_trial(launcher, trial.replace(memory_budget=total))
    assert (outcome.status, "is in use: " in (outcome.reason or "")) == ("oom", True)


SIDE = """
import json, sys
from longseq_bench.core.model import Trial
from longseq_bench.launchers.local import LocalLauncher
trial = Trial.model_validate_json(sys.argv[1])
print("\\n", LocalLauncher().run(trial, lambda *_: None).outcome.status, sep="")
"""


@pytest.mark.parametrize(("share", "status"), [(1.05, "ok"), (0.95, "oom")])
def test_two_trials_side_by_side_end_as_each_alone(
    trial: Trial, needed: int, share: float, status: str
) -> None:
    """Both fit the GPU; each has a little more or less memory than it needs."""
    text = trial.replace(memory_budget=int(share * needed), repeats=20).model_dump_json()
    for count in (1, 2):
        started = [
            subprocess.Popen([sys.executable, "-c", SIDE, text], text=True, **PIPES)
            for _ in range(count)
        ]
        ends = [one.communicate(timeout=200)[0].split()[-1] for one in started]
        assert ends == [status] * count
