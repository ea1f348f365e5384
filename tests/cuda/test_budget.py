"""A memory budget on a GPU is exact to 1 %, and neither the check nor others are part of it."""

import json
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
    code = (
        f"import torch; x = torch.ones({gib} << 28, device='cuda'); print(1, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], **PIPES) as process:
        assert process.stdout
        assert process.stdout.readline() == b"1\n"
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
if __name__ == "__main__":
    trial = Trial.model_validate_json(sys.stdin.read())
    outcome = LocalLauncher().run(trial, lambda *_: None).outcome
    print(json.dumps([outcome.status, outcome.reason, outcome.largest("peak")]))
"""


@pytest.mark.parametrize("share", [1.05, 0.95])
def test_two_trials_side_by_side_end_as_each_alone(trial: Trial, needed: int, share: float) -> None:
    """Each has more or less memory than it needs; both need under half of the GPU."""
    text = trial.replace(memory_budget=int(share * needed), repeats=20).model_dump_json()

    def run(count: int) -> list[list[Any]]:
        started = [
            subprocess.Popen([sys.executable, "-c", SIDE], text=True, **PIPES) for _ in range(count)
        ]
        for one in started:
            assert one.stdin
            one.stdin.write(text)
            one.stdin.close()
            one.stdin = None
        return [json.loads(one.communicate(timeout=200)[0].splitlines()[-1]) for one in started]

    (alone,) = run(1)
    assert alone[0] == ("ok" if share > 1 else "oom")
    assert [one[0] for one in run(2)] == [alone[0]] * 2
