"""RankSupervisor with messages and times made by hand: no process, no clock."""

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from longseq_bench.core.model import Outcome, Phase, Status, is_environment_failure
from longseq_bench.core.ranks import CONNECTING, OPENING, WAIT_FOR_DEVICE, WAIT_FOR_PEERS
from longseq_bench.launchers import local, rank_supervisor
from longseq_bench.launchers.rank_supervisor import (
    CAUSE_S,
    EXACT_FACTOR,
    GRACE_S,
    MEET_S,
    PEERS_S,
    PHASE_LIMIT_S,
    ProcessSample,
    RankSupervisor,
)
from tests.make import outcome, trial

IN_A_TRANSFER = ["torch/_ops.py:5 wait", f"core/ranks.py:9 {WAIT_FOR_PEERS}", "a/b.py:1 f"]
ON_DEVICE = ["torch/cuda/streams.py:5 synchronize", f"core/ranks.py:9 {WAIT_FOR_DEVICE}"]
IDLE, BUSY, STOPPED = ProcessSample(False, 0.05), ProcessSample(False, 0.9), ProcessSample(True)


def supervisor(ranks: int = 2, **fields: object) -> RankSupervisor:
    return RankSupervisor(trial("ring", world_size=ranks, **fields), 100.0)


def report(
    supervisor: RankSupervisor, rank: int, outcome: Outcome, now: float = 101.0, at: int = 1
) -> None:
    supervisor.add_message(rank, {"outcome": outcome.model_dump(mode="json"), "at": at}, now)


def enter(
    supervisor: RankSupervisor, phase: Phase, *ranks: int, now: float = 100.0, part: str = ""
) -> None:
    for rank in ranks:
        supervisor.add_message(rank, {"phase": phase, "part": part}, now)


def bad(status: Status, reason: str, phase: Phase = "forward", **facts: object) -> Outcome:
    return outcome(status, reason, phase, facts)


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_phases_of_a_trial_add_up_to_its_life(is_killed: bool) -> None:
    """Those of one kind are one figure: the passes of a trial are many."""
    one = supervisor(1)
    enter(one, "start", 0, now=100.5, part=OPENING)
    for number in (1, 2):
        enter(one, "time", 0, now=100.0 + number, part=f"pass {number}")
        enter(one, "check", 0, now=100.25 + number, part=f"pass {number}")
    expected = {"start": 0.5, f"start {OPENING}": 0.5, "time pass": 0.5, "check pass": 1.5}
    if is_killed:
        one.diagnose({0: BUSY}, {})
        expected["check pass"] += 0.5
    else:
        report(one, 0, outcome(), now=103.0)
        expected |= {"end": 0.5}
    found = one.outcome(103.5).facts["phase_s"]
    assert found == expected
    assert sum(found.values()) == 3.5


def test_ranks_that_do_not_connect_are_told_where_to_look() -> None:
    """The limit begins with the last of them; the first use of a GPU may take minutes."""
    one = supervisor()
    enter(one, "start", 0, 1, part=OPENING)
    enter(one, "start", 0, now=110.0, part=CONNECTING)
    assert one.deadline == 100.0 + PHASE_LIMIT_S
    enter(one, "start", 1, now=500.0, part=CONNECTING)
    assert one.deadline == 500.0 + MEET_S
    one.diagnose({0: IDLE, 1: IDLE}, {0: IN_A_TRANSFER, 1: IN_A_TRANSFER})
    found = one.outcome()
    assert (found.status, found.phase) == ("error", "start")
    assert "do their hosts reach each other at every port?" in (found.reason or "")


# ---- the launcher is stopped too ---------------------------------------------------------------


@pytest.mark.parametrize(("took_s", "is_environment"), [(1.5, False), (41.0, True)])
@pytest.mark.parametrize("state", [STOPPED, BUSY])
def test_a_trial_that_is_late_after_a_suspension_says_nothing(
    took_s: float, is_environment: bool, state: ProcessSample
) -> None:
    one = supervisor(1, time_budget=1.0)
    enter(one, "time", 0)
    one.add_wait(1.0, took_s)
    one.diagnose({0: state}, {})
    found = one.outcome()
    assert is_environment_failure(found) == is_environment
    if is_environment:
        assert "the launcher was stopped for 40 s" in (found.reason or "")
        assert found.phase == "time"
    else:
        assert found.status == ("hang" if state is STOPPED else "timeout")


def test_the_launcher_notices_that_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(handles: object, timeout: float) -> list[object]:
        time.sleep(timeout + 0.3)
        return []

    monkeypatch.setattr(rank_supervisor, "PAUSE_S", 0.2)
    monkeypatch.setattr(local, "wait", stop)
    one = RankSupervisor(trial(time_budget=0.1), time.monotonic())
    enter(one, "time", 0, now=time.monotonic() - GRACE_S)
    child: Any = SimpleNamespace(pipe=None, process=SimpleNamespace(sentinel=None))
    local._follow(one, [child], lambda phase, part: None)
    one.diagnose({0: BUSY}, {})
    assert is_environment_failure(one.outcome())


# ---- one rank ----------------------------------------------------------------------------------


def test_the_outcome_of_one_rank_is_that_of_the_trial() -> None:
    one, dead = supervisor(1), supervisor(1)
    assert not one.is_done(100.0)
    failed = bad("error", "it broke", traceback=["x"])
    report(one, 0, failed)
    assert one.is_done(101.0)
    assert (one.outcome(), one.signal_number) == (failed, 0)
    enter(dead, "forward", 0)
    dead.add_exit(0, -signal.SIGSEGV, "Fatal", False, 101.0, 5)
    found = dead.outcome()
    assert (found.status, found.reason, found.phase) == ("crashed", "killed by SIGSEGV", "forward")
    assert dead.signal_number == signal.SIGSEGV
    assert "ranks" not in found.facts


@pytest.mark.parametrize(
    ("phase", "part", "budget", "limit"),
    [
        ("communication", "", 2.0, PHASE_LIMIT_S),
        ("forward", "", 2.0, 2.0 + GRACE_S),
        ("time", "pass 1", 2.0, 2.0 + GRACE_S),
        ("forward", "exact", 2.0, 2.0 * EXACT_FACTOR + GRACE_S),
        ("forward", "", None, PHASE_LIMIT_S),
    ],
)
def test_each_phase_has_its_limit(
    phase: Phase, part: str, budget: float | None, limit: float
) -> None:
    one = supervisor(1, time_budget=budget)
    enter(one, phase, 0, now=200.0, part=part)
    assert one.deadline == pytest.approx(200.0 + limit)
    assert not one.is_late(200.0 + limit - 0.01)
    assert one.is_late(200.0 + limit)
    assert not one.is_done(200.0 + limit)


# ---- several ranks -----------------------------------------------------------------------------


def test_the_trial_is_done_when_all_ranks_are_and_has_the_measurements_of_each() -> None:
    both = supervisor()
    for rank, peak in ((1, 20.0), (0, 10.0)):
        assert not both.is_done(101.0)
        report(both, rank, outcome(facts={"from": rank}, peak=peak))
    assert both.is_done(101.0)
    combined = both.outcome()
    assert (combined.status, combined.reason) == ("ok", None)
    assert [(m.rank, m.samples) for m in combined.measurements] == [(0, (10.0,)), (1, (20.0,))]
    assert combined.facts == {"from": 0}


# ---- who is to blame ---------------------------------------------------------------------------

CLOSED = bad("error", "closed", lost_peer=True)
NO_ROOM = bad("oom", "no room")
WATCHDOG = "[PG 0 Rank 0] ProcessGroupNCCL's watchdog"


@pytest.mark.parametrize(
    ("events", "status", "reason", "signal_number"),
    [
        # memory outranks earlier failures
        ([(0, CLOSED), (2, bad("error", "odd")), (1, NO_ROOM)], "oom", "rank 1: no room", 0),
        ([(0, -signal.SIGSEGV), (1, NO_ROOM)], "oom", "rank 1: no room", 0),
        # a lost peer is never the cause where another is known
        ([(0, CLOSED), (1, 3)], "crashed", "rank 1: ended with exit code 3", 0),
        ([(0, CLOSED), (1, -signal.SIGSEGV)], "crashed", "rank 1: killed by SIGSEGV", 11),
        ([(0, CLOSED), (2, CLOSED)], "error", "rank 0: closed", 0),
        # an abort by NCCL's watchdog is a lost peer
        ([(0, -signal.SIGABRT), (1, -signal.SIGBUS)], "crashed", "rank 1: killed by SIGBUS", 7),
        # the first outcome of a rank counts
        ([(1, NO_ROOM), (1, -signal.SIGKILL)], "oom", "rank 1: no room", 0),
        # a kill by the kernel is for lack of memory
        (
            [(0, bad("error", "odd")), (1, -signal.SIGKILL)],
            "oom",
            "rank 1: killed by the kernel's out-of-memory killer",
            9,
        ),
    ],
)
def test_the_cause_is_distinguished_from_its_effects(
    events: list[tuple[int, Outcome | int]], status: str, reason: str, signal_number: int
) -> None:
    three = supervisor(3)
    for at, (rank, event) in enumerate(events, 1):
        if isinstance(event, Outcome):
            report(three, rank, event, at=at)
        else:
            three.add_exit(rank, event, WATCHDOG, event == -signal.SIGKILL, 101.0, at)
    found = three.outcome()
    assert (found.status, found.reason, three.signal_number) == (status, reason, signal_number)
    assert list(found.facts["ranks"]) == ["0", "1", "2"]
    assert found.facts.get("lost_peer") == (True if reason.endswith("closed") else None)


def test_the_earliest_failure_is_the_cause() -> None:
    """By the clocks of the ranks, not by the order of their messages."""
    three = supervisor(3)
    report(three, 2, outcome(peak=10.0))
    report(three, 0, bad("error", "late"), at=20)
    report(three, 1, bad("wrong", "early", "check"), at=10)
    found = three.outcome()
    assert (found.status, found.reason) == ("wrong", "rank 1: early")
    assert found.facts["ranks"] == {"0": "error in forward: late", "1": "wrong in check: early"}
    assert found.samples("peak") == (10.0,)


# ---- how long to wait --------------------------------------------------------------------------


def test_peers_of_a_failed_rank_have_time_to_report() -> None:
    """After a lost peer there is more time for the cause."""
    three = supervisor(3)
    report(three, 0, CLOSED, now=150.0)
    assert three.deadline == pytest.approx(150.0 + CAUSE_S)
    report(three, 1, NO_ROOM, now=151.0)
    assert three.deadline == pytest.approx(151.0 + PEERS_S)
    assert [three.is_done(150.9 + s) for s in (0.2, PEERS_S + 0.1)] == [False, True]
    assert not three.is_late(151.0 + PEERS_S)


def test_the_deadline_is_that_of_the_earliest_rank() -> None:
    """Backward shares the time limit of forward."""
    both = supervisor(time_budget=2.0)
    enter(both, "forward", 0, now=200.0)
    enter(both, "forward", 1, now=201.0)
    enter(both, "backward", 0, 1, now=201.9)
    assert both.deadline == pytest.approx(202.0 + GRACE_S)
    report(both, 0, outcome(), now=202.0)
    assert both.deadline == pytest.approx(203.0 + GRACE_S)


# ---- a rank is late ----------------------------------------------------------------------------


def stuck(ranks: int = 2) -> RankSupervisor:
    late = supervisor(ranks, time_budget=2.0)
    enter(late, "forward", *range(ranks))
    return late


def test_a_stopped_rank_is_a_hang_and_is_named_first() -> None:
    late = stuck(3)
    samples = {0: IDLE, 1: BUSY, 2: STOPPED}
    assert late.is_hang(samples)
    late.diagnose(samples, {0: IN_A_TRANSFER, 1: ON_DEVICE, 2: ["a/b.py:2 g"]})
    found = late.outcome()
    assert (found.status, found.phase) == ("hang", "forward")
    assert found.reason == (
        "rank 2: stopped (SIGSTOP) in forward; rank 0: waiting in communication; "
        "rank 1: busy in forward"
    )
    assert found.facts["stacks"]["0"] == IN_A_TRANSFER
    assert late.signal_number == 0


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        (f"core/ranks.py:9 {WAIT_FOR_PEERS}", "communication"),
        ("torch/distributed/distributed_c10d.py:2799 recv", "communication"),
        ("deepspeed/comm/comm.py:50 all_to_all_single", "communication"),
        (f"a/{WAIT_FOR_PEERS}.py:3 f", "forward"),  # a similar path of other code
    ],
)
def test_a_rank_waits_for_peers_only_inside_a_marked_function_or_a_library(
    line: str, phase: Phase
) -> None:
    late = stuck()
    late.diagnose({0: IDLE, 1: IDLE}, {0: ["a/b.py:1 f", line, "a/b.py:2 g"], 1: IN_A_TRANSFER})
    where = "rank 0, rank 1: waiting in communication"
    if phase == "forward":
        where = "rank 0: waiting in forward; rank 1: waiting in communication"
    assert (late.outcome().reason, late.outcome().phase) == (where, phase)


def test_a_device_that_is_waited_for_makes_it_a_timeout() -> None:
    """Its rank sleeps meanwhile, as one that waits for its peers does."""
    late = stuck()
    samples = dict.fromkeys(range(2), IDLE)
    assert late.is_hang(samples)
    late.diagnose(samples, {0: IN_A_TRANSFER, 1: ON_DEVICE})
    found = late.outcome()
    assert (found.status, found.facts["stacks"]["0"]) == ("timeout", IN_A_TRANSFER)
    assert found.reason == (
        "rank 1: one pass took longer than the 2 s allowed; its device computes, or waits for "
        "other ranks"
    )


@pytest.mark.parametrize(
    ("phases", "samples", "budget", "reason"),
    [
        # one rank that waits; a busy rank among waiting ones; the one over its limit; no budget
        (["forward"], [IDLE], 2.0, "one pass took longer than the 2 s allowed"),
        (["forward"] * 3, [IDLE, BUSY, IDLE], 2.0,
         "rank 1: one pass took longer than the 2 s allowed"),
        (["forward", "inputs"], [ProcessSample(False, 0.5), BUSY], 2.0,
         "rank 0: one pass took longer than the 2 s allowed"),
        (["plan", "plan"], [IDLE, BUSY], None, "rank 1: plan took longer than 900 s"),
    ],
)  # fmt: skip
def test_a_timeout_names_a_busy_rank_over_its_limit(
    phases: list[Phase], samples: list[ProcessSample], budget: float | None, reason: str
) -> None:
    late = supervisor(len(phases), time_budget=budget)
    for rank, phase in enumerate(phases):
        enter(late, phase, rank, now=100.0 + rank)
    assert not late.is_hang(dict(enumerate(samples)))
    late.diagnose(dict(enumerate(samples)), {})
    assert (late.outcome().status, late.outcome().reason) == ("timeout", reason)
