"""Trials with several ranks: the rank that fails is named, and nothing is left behind."""

import os
import socket
from contextlib import nullcontext, suppress

import psutil
import pytest

from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.core.ranks import WAIT_FOR_PEERS
from longseq_bench.launchers import local, rank_supervisor
from longseq_bench.launchers.local import LocalLauncher
from tests.make import trial
from tests.trials import passed

MIB, CORES = 2**20, len(os.sched_getaffinity(0))
SOON_S = 30
"""Shorter than any limit that would end a trial that was not ended at once."""


def ranks_trial(name: str, ranks: int = 2, **fields: object) -> Trial:
    known = {"heads": 1, "head_dim": 16, "repeats": 0, "threads": 1, **fields}
    return trial(name, 2048 * ranks, world_size=ranks, **known)


def run(launcher: LocalLauncher, name: str, ranks: int = 2, **fields: object) -> Outcome:
    return launcher.run(ranks_trial(name, ranks, **fields), print).outcome


def test_all_ranks_are_measured_and_connect_on_the_loopback_only(
    launcher: LocalLauncher, nothing_left: None
) -> None:
    """No other host can connect to a port of a trial."""
    addresses: set[str] = set()

    def read_addresses(phase: str, part: str) -> None:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                connections = child.net_connections("tcp")
                addresses.update(c.laddr.ip for c in connections if c.status == "LISTEN")

    launched = launcher.run(ranks_trial("ring", 3), read_addresses)
    outcome = passed(launched.outcome)
    assert sorted(m.rank for m in outcome.measurements if m.name == "peak") == [0, 1, 2]
    assert launched.processes == 3
    assert "ranks" not in outcome.facts
    assert addresses
    assert all(socket.inet_aton(ip)[0] == 127 for ip in addresses)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("rank-raises", "error", "rank 1: ValueError: rank one says no"),
        ("rank-kills-itself", "crashed", "rank 1: killed by SIGKILL"),
        # half a second after rank 0's "connection closed"
        ("rank-cuts-off", "oom", "rank 1: none left"),
    ],
)
def test_a_rank_that_dies_is_named(
    launcher: LocalLauncher, nothing_left: None, name: str, status: str, reason: str
) -> None:
    outcome = run(launcher, name, 3)
    assert (outcome.status, outcome.phase) == (status, "forward")
    assert outcome.reason == reason
    assert outcome.facts["ranks"]["1"] == f"{status} in forward: {reason.removeprefix('rank 1: ')}"


def test_one_rank_out_of_memory_is_out_of_memory(
    launcher: LocalLauncher, nothing_left: None
) -> None:
    outcome = run(launcher, "rank-eats", memory_budget=64 * MIB)
    assert (outcome.status, outcome.phase, outcome.fits) == ("oom", "forward", False)
    assert (outcome.reason or "").startswith("rank 1: ")
    assert "lost_peer" not in outcome.facts


def test_a_peer_says_what_it_saw(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fails leaves at once, so that the others learn of it."""
    monkeypatch.setattr(rank_supervisor, "PEERS_S", SOON_S)
    assert "onnection" in run(launcher, "rank-exits").facts["ranks"]["0"]


def test_a_child_that_does_not_get_far_leaves_nothing(
    launcher: LocalLauncher, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local._child_entry, "enter", "".format)
    outcome = run(launcher, "ring")
    assert (outcome.status, outcome.phase) == ("crashed", "start")
    assert outcome.reason == "every rank: ended with exit code 0 without a result"


# ---- ranks that do not end ---------------------------------------------------------------------


@pytest.fixture
def ended_soon(monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> None:
    """Ranks over their time limit have less time to report it themselves."""
    monkeypatch.setattr(rank_supervisor, "GRACE_S", 0.5)


def test_a_stopped_rank_is_a_hang(launcher: LocalLauncher, ended_soon: None) -> None:
    outcome = run(launcher, "rank-stops", time_budget=0.2)
    assert outcome.status == "hang"
    assert (
        outcome.reason == "rank 1: stopped (SIGSTOP) in forward; rank 0: waiting in communication"
    )
    stacks = outcome.facts["stacks"]
    assert stacks["1"] == []
    assert any(line.endswith(WAIT_FOR_PEERS) for line in stacks["0"])


def test_ranks_that_wait_for_each_other_are_a_hang(
    launcher: LocalLauncher, ended_soon: None
) -> None:
    outcome = run(launcher, "rank-waits", time_budget=0.2)
    assert (outcome.status, outcome.phase) == ("hang", "communication")
    assert outcome.reason == "rank 0, rank 1: waiting in communication"
    assert any("distributed_c10d.py" in line for line in outcome.facts["stacks"]["1"])
    lines = [line for stack in outcome.facts["stacks"].values() for line in stack]
    assert not [line for line in lines if line.startswith("/")]


def test_a_rank_that_computes_too_long_is_a_timeout(
    launcher: LocalLauncher, ended_soon: None
) -> None:
    outcome = run(launcher, "rank-spins", time_budget=0.2)
    assert outcome.status == "timeout"
    assert outcome.reason == "rank 1: one pass took longer than the 0.2 s allowed"


# ---- before anything runs ----------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "found"), [(None, max(1, CORES // 2)), (3, 3)])
def test_ranks_share_the_cores(launcher: LocalLauncher, asked: int | None, found: int) -> None:
    outcome = run(launcher, "rank-counts-threads", threads=asked)
    assert outcome.reason == f"rank 1: ValueError: {found} thread(s)"


WRONG = {"segments": (64,), "dilation": (1, 2)}


def ulysses(ranks: int, **fields: object) -> Trial:
    return trial("ulysses", 4096, world_size=ranks, **fields)


@pytest.mark.parametrize(
    ("trials", "problem"),
    [
        ([ulysses(3)], "ulysses: 8 heads can't be split over 3 ranks"),
        # options are checked with any number of ranks
        ([ulysses(4), trial("dilated", 64, WRONG, world_size=2)], "give one rate per segment"),
        # the world size of one trial is possible
        ([ulysses(3), ulysses(4)], None),
        ([ulysses(3, heads=8), ulysses(3, heads=6), ulysses(3, heads=8)], None),
        # trials of a search have one token
        ([trial("ring", 1, world_size=4), trial("ulysses", 2, world_size=4)], None),
    ],
)
def test_a_world_size_that_suits_no_trial_is_an_error(
    launcher: LocalLauncher, trials: list[Trial], problem: str | None
) -> None:
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        launcher.check(trials)
