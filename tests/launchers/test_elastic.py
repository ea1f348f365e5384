"""Ranks started by torch's elastic agents, on one node and on two; the second is a process here."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.core.stack_markers import WAIT_FOR_PEERS
from longseq_bench.launchers import control_channel, elastic, rank_supervisor
from longseq_bench.launchers.control_channel import NodeIdentity, NodeLink
from longseq_bench.launchers.elastic import ElasticLauncher, _Run, split
from longseq_bench.launchers.host_agent import HostJob, HostRanks, _Rank
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.launchers.rank_supervisor import RankSupervisor
from tests.launchers.test_ranks import asked

FOLLOWER = """
import sys
from longseq_bench.launchers.control_channel import NodeIdentity
from longseq_bench.launchers.follower import Follower
from longseq_bench.core.cluster_env import NodeInfo
site = NodeInfo(2, 1, 1, "127.0.0.1", int(sys.argv[1]))
hello = NodeIdentity(1, "beta", sys.argv[2])
try:
    Follower(site, hello, 20.0, print, lambda *outcome: print(*outcome)).follow()
except KeyboardInterrupt:
    sys.exit(130)
"""
PATIENCE_S = 20.0
SOON_S = 30

OnPhase = Callable[[str, str], None]


def ignore(phase: str, part: str) -> None:
    pass


def in_forward(action: Callable[[], object]) -> OnPhase:
    """Act once, when forward begins."""
    left = [action]

    def on_phase(phase: str, part: str) -> None:
        if phase == "forward" and left:
            left.pop()()

    return on_phase


def run(node_0: ElasticLauncher, of: Trial, on_phase: OnPhase = ignore) -> Outcome:
    return node_0.run(of, on_phase).outcome


# ---- worlds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "nodes", "per"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (8, 2, 4), (12, 3, 4)]
)
def test_a_smaller_world_takes_the_first_nodes(ranks: int, nodes: int, per: int) -> None:
    assert split(ranks, NodeInfo(3, 4)) == (nodes, per)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(6, "do not fill nodes of 4 ranks"), (16, "more than the 12 of this launch")],
)
def test_a_world_that_can_not_be_shared(ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(ranks, NodeInfo(3, 4))


# ---- a node that may be lost -------------------------------------------------------------------


def test_a_node_is_in_doubt_until_the_supervisor_knows_that_it_is_lost(
    launcher: LocalLauncher,
) -> None:
    """Also where it becomes lost by the clock between the two looks at it."""
    of = asked("ring")
    order = HostJob("run", of.model_dump(mode="json"), 2, 1, "127.0.0.1", 1, PATIENCE_S)
    seconds = 0.0
    channel = Mock(gone="", silent_s=lambda: seconds)
    link = NodeLink(NodeIdentity(1, "beta", "one"), channel)
    ranks = HostRanks(launcher._context)
    run = _Run(order, RankSupervisor(of, 0.0), ranks, {1: link}, "alpha", ignore)
    run.supervisor.add_outcome(
        0, Outcome(status="error", reason="cut", facts={"lost_peer": True}), 1.0, 1
    )
    seconds = elastic.SILENT_S - 0.1
    assert not run._in_doubt()
    seconds = control_channel.LOST_S - 0.1
    run._fail_lost_nodes()
    seconds = control_channel.LOST_S + 0.1
    assert run._in_doubt()
    run._fail_lost_nodes()
    assert not run._in_doubt()
    assert "no message from node 1 (beta)" in (run.supervisor.outcome().reason or "")


# ---- one node ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(launcher: LocalLauncher) -> Iterator[ElasticLauncher]:
    """Node 0 of one, with two ranks; in the fork server of the session."""
    with ElasticLauncher(NodeInfo(1, 2), NodeIdentity(0, "alpha", "zero"), PATIENCE_S) as node_0:
        # what stays open from here on is there
        run(node_0, asked("ring", 1))
        yield node_0


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_are_measured(alone: ElasticLauncher, nothing_left: None, ranks: int) -> None:
    outcome = run(alone, asked("ring", ranks, repeats=1))
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert sorted(m.rank for m in outcome.measurements if m.name == "peak") == list(range(ranks))
    assert outcome.facts["hosts"] == ["alpha"]


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("rank-raises", "error", "rank 1: ValueError: rank one says no"),
        ("rank-exits", "crashed", "rank 1: ended with exit code 3"),
        ("rank-kills-itself", "crashed", "rank 1: killed by SIGKILL"),
        ("rank-cuts-off", "oom", "rank 1: none left"),
    ],
)
def test_a_rank_that_dies_is_named_though_torch_ends_the_others(
    alone: ElasticLauncher, nothing_left: None, name: str, status: str, reason: str
) -> None:
    outcome = run(alone, asked(name))
    assert (outcome.status, outcome.reason) == (status, reason)


def test_a_native_death_gets_a_second_opinion(alone: ElasticLauncher) -> None:
    launched = alone.run(asked("rank-native", memory_budget=64 * 2**20), ignore)
    assert (launched.outcome.status, launched.processes) == ("oom", 4)


def test_a_dead_agent_is_named(alone: ElasticLauncher) -> None:
    def kill(phase: str, part: str) -> None:
        alone._node._process.kill()

    outcome = run(alone, asked("ring"), kill)
    assert outcome.status == "error"
    assert "torch's agent ended (killed by SIGKILL)" in (outcome.reason or "")
    assert run(alone, asked("ring")).status == "ok"


def test_a_rank_that_torch_ends_for_another_is_not_to_blame() -> None:
    """torch's agent ends all ranks of its host with SIGTERM, as soon as it finds one dead."""
    context = multiprocessing.get_context("forkserver")
    node = HostRanks(context)
    node._ranks = {rank: _Rank(context.Pipe(duplex=False)[0]) for rank in range(3)}
    node._open, node._kills = {}, 0
    events = [
        *node._ended(1, {"exit": -signal.SIGKILL, "at": 1}),
        *node._ended(0, {"exit": -signal.SIGTERM, "at": 2}),
        *node._ended(2, {"exit": -signal.SIGSEGV, "at": 3}),
    ]
    for rank in node._ranks.values():
        rank.pipe.close()
        rank.output.close()
    assert [(e["rank"], e.get("exit"), "lost_peer" in e) for e in events] == [
        (1, -signal.SIGKILL, False), (0, None, True), (2, -signal.SIGSEGV, False),
    ]  # fmt: skip


@pytest.mark.parametrize("step", ["start", "end"])
def test_ctrl_c_waits_until_a_step_is_done(
    alone: ElasticLauncher, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A process that is started by halves is found by nobody."""
    done: list[str] = []
    real = getattr(HostRanks, f"_{step}")

    def interrupted(node: HostRanks, *order: HostJob) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        found = real(node, *order)
        done.append(step)
        return found

    monkeypatch.setattr(HostRanks, f"_{step}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(alone, asked("ring"))
    assert step in done
    assert alone._node.handles == []


def test_a_port_that_is_taken_is_named(
    alone: ElasticLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(elastic, "_free_port", lambda: port)
        outcome = run(alone, asked("ring"))
    assert (outcome.status, outcome.phase) == ("error", "start")
    assert f"(ranks meet at 127.0.0.1:{port})" in (outcome.reason or "")


def test_ranks_that_do_not_meet_are_not_waited_for_for_ever(
    alone: ElasticLauncher, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster's firewall lets the rendezvous through, and no other port."""
    monkeypatch.setattr(elastic, "MEET_S", 0.0)
    outcome = run(alone, asked("ring"))
    assert outcome.status == "error"
    assert "did not meet at 127.0.0.1:" in (outcome.reason or "")


def test_a_world_of_no_launch_is_unsupported(alone: ElasticLauncher) -> None:
    outcome = run(alone, asked("ring", 3))
    assert (outcome.status, outcome.phase) == ("unsupported", "start")


# ---- two nodes ---------------------------------------------------------------------------------


class Two:
    """Node 0 in this process, node 1 in one of its own."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self._port = found.getsockname()[1]
        site = NodeInfo(2, 1, 0, "127.0.0.1", self._port)
        self.node_0 = ElasticLauncher(site, NodeIdentity(0, "alpha", "zero"), PATIENCE_S)
        self.start()

    def start(self) -> None:
        """Start node 1, another one each time."""
        self.node_1 = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, str(self._port), uuid.uuid4().hex],
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def processes_of_node_1(self) -> list[psutil.Process]:
        """Node 1's agents and ranks, if a trial is under way: its fork server's children."""
        below = psutil.Process(self.node_1.pid).children()
        return [child for server in below for child in server.children(recursive=True)]

    def run(self, of: Trial, on_phase: OnPhase = ignore) -> Outcome:
        return run(self.node_0, of, on_phase)


@pytest.fixture(scope="module")
def two(launcher: LocalLauncher) -> Iterator[Two]:
    launcher.catalogue()
    with ExitStack() as stack:
        both = Two()
        stack.callback(lambda: both.node_1.kill())
        stack.enter_context(both.node_0)
        both.run(asked("ring"))
        yield both
        stack.pop_all().close()
    both.node_1.kill()
    both.node_1.wait()


def test_two_nodes_share_a_trial(two: Two, nothing_left: None) -> None:
    outcome = two.run(asked("ring"))
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.facts["hosts"] == ["alpha", "beta"]
    assert {m.rank for m in outcome.measurements} == {0, 1}
    assert two.processes_of_node_1() == []


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("rank-raises", "error", "rank 1 (host beta): ValueError: rank one says no"),
        ("rank-kills-itself", "crashed", "rank 1 (host beta): killed by SIGKILL"),
        ("rank-cuts-off", "oom", "rank 1 (host beta): none left"),
    ],
)
def test_a_rank_of_the_other_node_is_named(two: Two, name: str, status: str, reason: str) -> None:
    outcome = two.run(asked(name))
    assert (outcome.status, outcome.reason, outcome.phase) == (status, reason, "forward")
    assert "onnection" in outcome.facts["ranks"]["0"]
    assert two.processes_of_node_1() == []


def test_a_rank_that_is_stopped_there_is_seen_from_here(two: Two) -> None:
    outcome = two.run(asked("rank-stops", time_budget=0.5))
    assert outcome.status == "hang"
    assert "rank 1 (host beta) is stopped (SIGSTOP)" in (outcome.reason or "")
    stacks = outcome.facts["stacks"]
    assert "misbehaving" in stacks["1"][0]
    assert any(line.endswith(WAIT_FOR_PEERS) for line in stacks["0"])
    assert not any("elastic_ranks" in line for line in stacks["1"])
    assert two.processes_of_node_1() == []


def test_what_a_rank_there_leaves_behind_is_killed_and_told(two: Two) -> None:
    outcome = two.run(asked("rank-grandchild"))
    assert outcome.status == "ok"
    assert "left 1 process(es) behind, killed: python" in (outcome.reason or "")
    assert "on beta" in (outcome.reason or "")
    assert two.processes_of_node_1() == []


def test_a_world_of_one_runs_here_alone(two: Two) -> None:
    outcome = two.run(asked("ring", 1))
    assert (outcome.status, outcome.facts["hosts"]) == ("ok", ["alpha"])


def test_ranks_share_the_cores_of_their_own_host(two: Two) -> None:
    outcome = two.run(asked("rank-counts-threads", threads=None))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert f"{cores} thread(s)" in (outcome.reason or "")


def test_a_cut_that_heals_in_time_costs_nothing(two: Two) -> None:
    def pause() -> None:
        two.node_1.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        two.node_1.send_signal(signal.SIGCONT)

    assert two.run(asked("ring"), in_forward(pause)).status == "ok"


def test_a_silent_node_ends_its_trial_and_not_the_next(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the cable is cut: nothing is closed, and nothing comes."""
    monkeypatch.setattr(control_channel, "LOST_S", 2.0)
    stop = in_forward(lambda: two.node_1.send_signal(signal.SIGSTOP))
    outcome = two.run(asked("rank-waits", time_budget=60), stop)
    two.node_1.send_signal(signal.SIGCONT)
    assert outcome.status == "error"
    assert "rank 1 (host beta): no message from node 1 (beta) for " in (outcome.reason or "")
    assert two.run(asked("ring")).status == "ok"
    assert two.processes_of_node_1() == []


def test_a_rank_whose_peer_is_on_a_silent_node_is_not_to_blame(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says at once that the connection was closed; that its host is lost shows later."""
    monkeypatch.setattr(rank_supervisor, "CAUSE_S", 1.5)
    monkeypatch.setattr(control_channel, "LOST_S", 4.0)
    monkeypatch.setattr(elastic, "SILENT_S", 1.2)

    def lose() -> None:
        two.node_1.send_signal(signal.SIGSTOP)
        for process in two.processes_of_node_1():
            with suppress(psutil.NoSuchProcess):  # a rank ends with its agent
                process.kill()

    try:
        outcome = two.run(asked("rank-waits", time_budget=60), in_forward(lose))
    finally:
        two.node_1.send_signal(signal.SIGCONT)
    assert outcome.facts["ranks"]["0"].startswith("error in forward: ")
    assert "rank 1 (host beta): no message from node 1 (beta) for " in (outcome.reason or "")


def test_a_connection_that_breaks_ends_the_ranks_on_both_ends(two: Two) -> None:
    assert two.node_0._hub
    channel = two.node_0._hub.links[1].channel
    hang_up = in_forward(lambda: channel.leave("the test broke it"))
    outcome = two.run(asked("rank-waits", time_budget=60), hang_up)
    assert outcome.status == "error"
    end = time.monotonic() + SOON_S
    while two.processes_of_node_1() and time.monotonic() < end:
        time.sleep(0.05)
    assert two.processes_of_node_1() == []
    assert two.run(asked("ring")).status == "ok"


def test_a_node_that_is_gone_is_waited_for_once_and_may_be_replaced(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = two.run(asked("rank-waits", time_budget=60), in_forward(two.node_1.kill))
    assert outcome.status == "error"
    assert re.fullmatch(
        r"rank 1 \(host beta\): node 1 \(beta\) is gone: "
        r"(it closed the connection|connection reset by peer)",  # with something unread in it
        outcome.reason or "",
    )
    monkeypatch.setattr(two.node_0, "_patience", 2.0)
    assert "waited 2 s for it" in (two.run(asked("ring")).reason or "")
    assert "waited 1 s for it" in (two.run(asked("ring")).reason or "")
    monkeypatch.setattr(elastic, "SHORT_S", SOON_S)
    two.start()
    assert two.run(asked("ring")).status == "ok"


def test_ctrl_c_on_one_node_is_ctrl_c_on_all(two: Two) -> None:
    """The last test of these: node 1 has ended."""
    interrupt = in_forward(lambda: two.node_1.send_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="on node 1"):
        two.run(asked("rank-waits", time_budget=60), interrupt)
    assert two.node_1.wait(SOON_S) == 130
