"""Isolation: every failure has its reason, nothing is left behind, the next trial runs."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from longseq_bench.core.model import Outcome, Trial, environment_failure, is_environment_failure
from longseq_bench.launchers import fork_server
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.launchers.process_inspection import kill_orphans
from tests.make import outcome, trial
from tests.trials import MIB, complete, run


def test_a_good_trial_leaves_nothing_and_reports_its_phases(
    launcher: LocalLauncher, nothing_left: None
) -> None:
    phases: list[str] = []
    trial = complete(launcher, "sdpa", 256, mode="train", repeats=2)
    start = time.perf_counter()
    outcome = launcher.run(trial, lambda phase, part: phases.append(phase)).outcome
    life_s = time.perf_counter() - start
    assert (outcome.status, outcome.reason) == ("ok", None)
    order = ["start", "inputs", "plan", "forward", "backward", "check", "time"]
    assert list(dict.fromkeys(phases)) == order
    phase_s = outcome.facts["phase_s"]
    assert {name.split()[0] for name in phase_s} == {*order, "end"}
    assert sum(phase_s.values()) == pytest.approx(life_s, rel=0.1, abs=0.1)


@pytest.mark.parametrize(
    ("name", "status", "reason", "phase"),
    [
        ("bad-kills-itself", "crashed", "killed by SIGKILL", "forward"),
        ("bad-exits", "crashed", "ended with exit code 3", "forward"),
        ("bad-segfault", "crashed", "killed by SIGSEGV", "forward"),
        ("bad-sleeps", "timeout", "0.3 s", "forward"),
        ("bad-limit", "limit", "grid of 70000 blocks exceeds 65535", "forward"),
        ("bad-import", "unsupported", "no_such_name", "start"),
        ("bad-eats", "oom", "can't allocate memory", "forward"),
        # fault 11: not out of memory
        ("bad-shape", "error", "shapes cannot be multiplied", "forward"),
    ],
)
def test_each_failure_has_its_reason(
    launcher: LocalLauncher, nothing_left: None, name: str, status: str, reason: str, phase: str
) -> None:
    budget = 64 * MIB if name in ("bad-eats", "bad-shape") else None
    seconds = 0.3 if name == "bad-sleeps" else None
    outcome = run(launcher, name, memory_budget=budget, time_budget=seconds)
    assert (outcome.status, outcome.phase) == (status, phase)
    assert outcome.fits is (False if status == "oom" else None)
    assert reason in (outcome.reason or "")


def test_a_dry_run_that_hangs_gives_no_estimate(
    launcher: LocalLauncher, nothing_left: None
) -> None:
    trial = complete(launcher, "bad-sleeps", 2048, {"walks": True})
    estimates = launcher.dry_run([trial, trial], limit=1.0)
    assert len(estimates) == 2
    for estimate in estimates:
        assert "died, or did not end within 1 s" in (estimate.unsupported or "")


def test_children_of_other_processes_are_not_killed(launcher: LocalLauncher) -> None:
    assert launcher.catalogue()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        kill_orphans()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_grandchild_is_killed(launcher: LocalLauncher, nothing_left: None) -> None:
    assert run(launcher, "bad-grandchild").status == "ok"


def test_a_native_crash_under_a_budget_is_retried_with_more_memory(launcher: LocalLauncher) -> None:
    trial = complete(launcher, "bad-native", memory_budget=64 * MIB)
    launched = launcher.run(trial, print)
    assert launched.outcome.status == "oom"
    assert launched.processes == 3
    assert "killed by SIGSEGV under 64 MiB, passes under" in (launched.outcome.reason or "")


def test_a_crash_with_more_memory_too_stays_a_crash(launcher: LocalLauncher) -> None:
    trial = complete(launcher, "bad-segfault", memory_budget=64 * MIB)
    launched = launcher.run(trial, print)
    assert (launched.outcome.status, launched.processes) == ("crashed", 2)


def test_an_unsupported_length_is_refused_before_anything_runs(launcher: LocalLauncher) -> None:
    odd = run(launcher, "bad-refuses", 2049)
    assert (odd.status, odd.reason) == ("unsupported", "odd lengths need odd=true")
    assert odd.samples("peak") == ()
    assert run(launcher, "bad-refuses", 2048).status == "ok"


def test_output_of_a_trial_does_not_reach_the_terminal(
    launcher: LocalLauncher, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(launcher, "bad-segfault")
    assert "Segmentation fault" in " ".join(outcome.facts["output"])
    assert capfd.readouterr() == ("", "")


def attempts(*outcomes: Outcome) -> tuple[LocalLauncher, list[int | None]]:
    """A launcher whose processes end with these outcomes, and the budgets that they had.

    A crash is by SIGSEGV.
    """
    launcher, budgets, left = LocalLauncher(), list[int | None](), list(outcomes)

    def attempt(trial: Trial, on_phase: object) -> tuple[Outcome, int]:
        budgets.append(trial.memory_budget)
        found = left.pop(0)
        return found, signal.SIGSEGV if found.status == "crashed" else 0

    launcher._attempt = attempt  # type: ignore[method-assign]
    return launcher, budgets


LOST = outcome("error", "AcceleratorError: CUDA error: unspecified", facts={"device_error": True})
KILLED = environment_failure("the fork server was killed", "forward")


@pytest.mark.parametrize(
    ("ends", "status", "reason", "budgets"),
    [
        # the record names the first failure of a device
        ([LOST, outcome()], "ok",
         f"passed in a second process; the first failed: {LOST.reason}", 2),
        ([LOST, LOST], "error", f"{LOST.reason}; a second process failed in the same way", 2),
        ([LOST, outcome("oom", "too large")], "oom",
         f"too large; a first process failed: {LOST.reason}", 2),
        # a crash that does not repeat, such as SIGSEGV sent by another program
        ([outcome("crashed", "killed by SIGSEGV"), outcome(), outcome()], "crashed",
         "killed by SIGSEGV; a second process passed with the same memory", 3),
    ],
)  # fmt: skip
def test_a_failure_that_may_not_repeat_is_tried_once_more(
    ends: list[Outcome], status: str, reason: str, budgets: int
) -> None:
    """In a fresh process."""
    launcher, given = attempts(*ends)
    found = launcher.run(trial(world_size=2, memory_budget=2**30), print)
    assert (found.outcome.status, found.outcome.reason) == (status, reason)
    assert (found.processes, len(given)) == (2 * budgets, budgets)
    if ends[0] is LOST:
        assert found.outcome.facts["first_attempt"] == LOST.reason
        assert given == [2**30] * 2


@pytest.mark.parametrize("second", [outcome("ok"), KILLED])
def test_what_something_else_ended_is_tried_once_more(second: Outcome) -> None:
    """If it happens again, the record says that the trial has to run again."""
    launcher, budgets = attempts(KILLED, second)
    found = launcher.run(trial(memory_budget=2**30), print).outcome
    assert (found.status, len(budgets)) == (second.status, 2)
    assert found.facts["first_attempt"] == KILLED.reason
    assert is_environment_failure(found) == (second is KILLED)


def test_a_signal_from_outside_is_named(launcher: LocalLauncher, nothing_left: None) -> None:
    """Python's handler would make it an exit with code 1."""

    def interrupt(phase: str, part: str) -> None:
        if phase == "forward":
            (child,) = psutil.Process(fork_server.pid()).children()
            child.send_signal(signal.SIGINT)

    found = launcher.run(complete(launcher, "bad-sleeps"), interrupt)
    assert is_environment_failure(found.outcome)
    assert (found.outcome.reason, found.processes) == (
        "killed by SIGINT; a second process failed in the same way", 2,
    )  # fmt: skip
