"""Ranks started by torch's elastic agents, on one node and on two; the second is a process here."""

import copy
import json
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
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from longseq_bench.core.catalogue import DeviceInfo
from longseq_bench.core.cluster_env import NodeInfo, split
from longseq_bench.core.environment_failure import is_environment_failure
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.core.rank_start import CONNECTING, OPENING, WARMING_UP
from longseq_bench.core.stack_markers import WAIT_FOR_PEERS
from longseq_bench.launchers import control_channel, elastic, host_agent, rank_supervisor
from longseq_bench.launchers.control_channel import Channel, NodeLink
from longseq_bench.launchers.control_messages import EVENTS, NodeIdentity
from longseq_bench.launchers.elastic import (
    RENDEZVOUS_TIMEOUT_S,
    ElasticLauncher,
    _Run,
)
from longseq_bench.launchers.host_agent import HostJob, HostRanks, _Rank
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.launchers.process_inspection import sample_processes
from longseq_bench.launchers.rank_supervisor import RankSupervisor
from longseq_bench.worker import elastic_ranks
from longseq_bench.worker.elastic_ranks import _Agent
from tests.launchers.test_ranks import ranks_trial

FOLLOWER = """
import sys
from longseq_bench.launchers import control_channel
control_channel.HEARTBEAT_S = 0.2
from longseq_bench.launchers.control_messages import NodeIdentity
from longseq_bench.launchers.follower import Follower
from longseq_bench.core.cluster_env import NodeInfo
from unittest.mock import Mock
host, port, token = sys.argv[1:]
cluster = NodeInfo(2, 1, 1, host, int(port))
identity = NodeIdentity(node=1, host="beta", token=token)
try:
    any_command = Mock(**{"refusal.return_value": ""})
    Follower(cluster, identity, b"a key of the tests", any_command, 20.0, print, print).follow()
except KeyboardInterrupt:
    sys.exit(130)
"""
KEY = b"a key of the tests"
ALPHA = NodeIdentity(node=0, host="alpha", token="zero")
PATIENCE_S = 20.0
SOON_S = 30

OnPhase = Callable[[str, str], None]


def ignore(phase: str, part: str) -> None:
    pass


def in_forward(action: Callable[[], object], of: str = "forward") -> OnPhase:
    """Return a callback that calls the action once, when forward begins, or another phase."""
    pending = [action]

    def on_phase(phase: str, part: str) -> None:
        if phase == of and pending:
            pending.pop()()

    return on_phase


def add(one: _Run, event: dict[str, Any], node: int = 0) -> None:
    one._add_event(node, EVENTS.validate_python(event))


def run(node_0: ElasticLauncher, of: Trial, on_phase: OnPhase = ignore) -> Outcome:
    return node_0.run(of, on_phase).outcome


# ---- world sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "nodes", "per"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (8, 2, 4), (12, 3, 4)]
)
def test_a_smaller_world_runs_on_the_first_nodes(ranks: int, nodes: int, per: int) -> None:
    assert split(ranks, NodeInfo(3, 4)) == (nodes, per)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(6, "do not fill nodes of 4 ranks"), (16, "more than the 12 of this launch")],
)
def test_a_world_that_does_not_fill_nodes_is_refused(ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(ranks, NodeInfo(3, 4))


# ---- a node that may be lost ---------------------------------------------------------------------


def test_a_node_is_a_possible_cause_until_the_supervisor_knows_that_it_is_lost(
    launcher: LocalLauncher,
) -> None:
    """Also if its silence exceeds the limit between the two checks."""
    of = ranks_trial("ring")
    job = HostJob("run", of.model_dump(mode="json"), 2, 1, "127.0.0.1", 1, PATIENCE_S)
    seconds = 0.0
    channel = Mock(disconnect_reason="", silent_s=lambda: seconds)
    link = NodeLink(NodeIdentity(node=1, host="beta", token="one"), channel)
    ranks = HostRanks(launcher.context)
    run = _Run(job, RankSupervisor(of, 0.0), ranks, {1: link}, "alpha", ignore)
    run.supervisor.add_outcome(
        0, Outcome(status="error", reason="cut", facts={"lost_peer": True}), 1.0, 1
    )
    seconds = elastic.SILENT_S - 0.1
    assert not run._is_cause_pending()
    seconds = control_channel.LOST_S - 0.1
    run._fail_lost_nodes()
    seconds = control_channel.LOST_S + 0.1
    assert run._is_cause_pending()
    run._fail_lost_nodes()
    assert not run._is_cause_pending()
    assert "no message from node 1 (beta)" in (run.supervisor.outcome().reason or "")
    assert is_environment_failure(run.supervisor.outcome())


def two_nodes_run(offset_ns: int = 0) -> tuple[_Run, Mock]:
    """A trial on two nodes, whose clocks differ by an offset, and the channel to node 1."""
    of = ranks_trial("ring")
    job = HostJob("run", of.model_dump(mode="json"), 2, 1, "127.0.0.1", 1, PATIENCE_S)
    channel = Mock(disconnect_reason="", silent_s=lambda: 0.0, clock_offset_ns=offset_ns)
    link = NodeLink(NodeIdentity(node=1, host="beta", token="one"), channel)
    supervisor = RankSupervisor(of, 0.0)
    return _Run(job, supervisor, Mock(), {1: link}, "alpha", ignore), channel


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_the_rank_that_failed_first_is_blamed_if_clocks_differ(hours: int) -> None:
    """The clock of node 1 is ahead by these hours; its rank failed 0.2 s after that of node 0."""
    second_ns = 10**9
    ahead_ns = hours * 3600 * second_ns
    one, _ = two_nodes_run(-ahead_ns)
    failed = Outcome(status="error", reason="none left", phase="forward").model_dump(mode="json")
    start_ns = 10**6 * second_ns
    for node, late_ns in ((1, ahead_ns + second_ns // 5), (0, 0)):
        report = {"outcome": failed, "at": start_ns + late_ns}
        add(one, {"rank": node, "message": report}, node)
    assert one.supervisor.failed == [0, 1]


@pytest.mark.parametrize(
    "event",
    [
        {"rank": 0, "message": {"outcome": {"status": "ok"}, "at": 1}},
        {"rank": 0, "exit": -9, "printed": "", "killed": False, "at": 1},
        {"rank": 7, "lost_peer": "made up", "at": 1},
    ],
)
def test_a_node_reports_its_own_ranks_only(event: dict[str, Any]) -> None:
    one, channel = two_nodes_run()
    add(one, event, node=1)
    assert one.supervisor.running == [0, 1]
    (reason,) = channel.disconnect.call_args.args
    assert reason == f"it reported rank {event['rank']}, not one of its own"


# ---- one node ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(launcher: LocalLauncher) -> Iterator[ElasticLauncher]:
    """A single node with two ranks, in the fork server of the session."""
    with ElasticLauncher(NodeInfo(1, 2), ALPHA, KEY, PATIENCE_S) as node_0:
        # run once, so that files that stay open are open already
        run(node_0, ranks_trial("ring", 1))
        yield node_0


@pytest.mark.parametrize(
    ("gpus", "reason"), [(4, None), (1, "2 ranks on a host with 1 GPU(s), and two can't share one")]
)
def test_cuda_needs_a_gpu_for_each_rank_of_a_host(
    alone: ElasticLauncher, monkeypatch: pytest.MonkeyPatch, gpus: int, reason: str | None
) -> None:
    here = alone.catalogue()
    cuda = DeviceInfo(name="G", count=gpus)
    known = here.model_copy(update={"devices": here.devices | {"cuda": cuda}})
    monkeypatch.setattr(LocalLauncher, "catalogue", lambda *_: known)
    found = alone.catalogue().devices["cuda"]
    assert (found.unavailable, found.remedy) == (
        reason, "use --nproc-per-node 1" if reason else "",
    )  # fmt: skip
    if reason is None:
        assert found.count == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_are_measured(alone: ElasticLauncher, nothing_left: None, ranks: int) -> None:
    outcome = run(alone, ranks_trial("ring", ranks, repeats=1))
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
def test_the_rank_that_died_is_named_although_torch_ends_the_others(
    alone: ElasticLauncher, nothing_left: None, name: str, status: str, reason: str
) -> None:
    outcome = run(alone, ranks_trial(name))
    assert (outcome.status, outcome.reason) == (status, reason)


@pytest.mark.parametrize("dies_before_the_check", [True, False])
def test_the_exit_of_the_rank_that_died_first_is_reported_first(
    monkeypatch: pytest.MonkeyPatch, dies_before_the_check: bool
) -> None:
    """torch reaps it and ends the others in one call; both exits must be known after it."""
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    processes = [Mock(exitcode=None) for _ in ranks]

    def ends_the_others(agent: _Agent, group: WorkerGroup) -> RunResult:
        ranks[1].kill()
        processes[1].exitcode = ranks[1].wait()
        ranks[0].terminate()
        processes[0].exitcode = ranks[0].wait()
        return RunResult(WorkerState.FAILED, failures={1: Mock(local_rank=1)})

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", ends_the_others)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    agent = object.__new__(_Agent)
    agent._pids = {local_rank: rank.pid for local_rank, rank in enumerate(ranks)}
    agent._events, agent._pcontext = sender, Mock(_pc=Mock(processes=processes))
    if dies_before_the_check:
        ranks[1].kill()
        os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)
    agent._monitor_workers(Mock())
    events = [json.loads(receiver.recv_bytes()) for _ in ranks]
    assert not receiver.poll()
    assert [(event["local_rank"], event["exit"]) for event in events] == [
        (1, -signal.SIGKILL), (0, -signal.SIGTERM),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_to_a_rank_that_is_just_forked_is_named(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The rank still has the handlers of torch's agent: they raise, and it would exit with 1."""

    def fork(agent: _Agent, group: WorkerGroup) -> dict[int, int]:
        pid = os.fork()
        if not pid:
            try:
                os.kill(os.getpid(), number)
                elastic_ranks._become_a_child(os.open(os.devnull, os.O_WRONLY))
            finally:
                os._exit(1)
        return {0: pid}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", fork)
    agent = object.__new__(_Agent)
    agent._events, agent._pipes = Mock(), []
    before = signal.signal(number, elastic_handler)
    try:
        (pid,) = agent._start_workers(Mock()).values()
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(number, before)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number


def elastic_handler(number: int, frame: object) -> None:
    raise SignalException("", signal.Signals(number))


def test_a_native_crash_is_retried_with_more_memory(alone: ElasticLauncher) -> None:
    launched = alone.run(ranks_trial("rank-native", memory_budget=64 * 2**20), ignore)
    assert (launched.outcome.status, launched.processes) == ("oom", 6)


def test_a_dead_agent_is_named(alone: ElasticLauncher) -> None:
    """It is no part of the trial, which runs once more. Then resuming runs it again."""

    def kill(phase: str, part: str) -> None:
        if phase == "forward":
            alone._host_ranks._process.kill()

    outcome = run(alone, ranks_trial("rank-waits", time_budget=60), kill)
    assert outcome.status == "error"
    assert is_environment_failure(outcome)
    assert "torch's agent ended (killed by SIGKILL)" in (outcome.reason or "")
    assert "torch's agent ended" in outcome.facts["first_attempt"]
    assert run(alone, ranks_trial("ring")).status == "ok"


def test_a_rank_ended_because_of_a_peer_is_not_blamed() -> None:
    """torch's agent ends all ranks of its host with SIGTERM, as soon as it finds one dead."""
    context = multiprocessing.get_context("forkserver")
    node = HostRanks(context)
    node._ranks = {rank: _Rank(context.Pipe(duplex=False)[0]) for rank in range(3)}
    node._open, node._kills_before = {}, 0
    events = [
        *node._process_exit(1, {"exit": -signal.SIGKILL, "at": 1}),
        *node._process_exit(0, {"exit": -signal.SIGTERM, "at": 2}),
        *node._process_exit(2, {"exit": -signal.SIGSEGV, "at": 3}),
    ]
    for rank in node._ranks.values():
        rank.pipe.close()
        rank.output.close()
    assert [(e["rank"], e.get("exit"), "lost_peer" in e) for e in events] == [
        (1, -signal.SIGKILL, False), (0, None, True), (2, -signal.SIGSEGV, False),
    ]  # fmt: skip


@pytest.mark.parametrize("step", ["start", "end"])
def test_ctrl_c_is_deferred_during_start_and_end(
    alone: ElasticLauncher, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """An interrupt during a start would leave a process that nothing can find."""
    done: list[str] = []
    real = getattr(HostRanks, f"_{step}")

    def interrupted(node: HostRanks, *job: HostJob) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        found = real(node, *job)
        done.append(step)
        return found

    monkeypatch.setattr(HostRanks, f"_{step}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(alone, ranks_trial("ring"))
    assert step in done
    assert alone._host_ranks.handles == []


def test_a_port_in_use_is_named(alone: ElasticLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(elastic, "_free_port", lambda address: port)
        outcome = run(alone, ranks_trial("ring"))
    assert (outcome.status, outcome.phase) == ("error", "start")
    assert f"(ranks meet at 127.0.0.1:{port})" in (outcome.reason or "")


def test_ranks_that_do_not_connect_time_out(
    alone: ElasticLauncher, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a firewall that only opens the port of the rendezvous."""
    monkeypatch.setattr(elastic, "RENDEZVOUS_TIMEOUT_S", 0.0)
    outcome = run(alone, ranks_trial("ring"))
    assert outcome.status == "error"
    assert "did not meet at 127.0.0.1:" in (outcome.reason or "")


def test_only_connecting_has_the_time_limit_of_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first use of a GPU may be slow before it, and a compiler after it."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    of = ranks_trial("ring")
    job = HostJob("run", of.model_dump(mode="json"), 1, 2, "127.0.0.1", 1, timeout_s=10.0)
    one = _Run(job, RankSupervisor(of, now), None, {}, "alpha", ignore)  # type: ignore[arg-type]

    def enter(rank: int, part: str, later_s: float) -> list[int]:
        """Return the ranks that failed a while after a rank entered a part of its start."""
        nonlocal now
        add(one, {"rank": rank, "message": {"phase": "start", "part": part}})
        now += later_s
        one._fail_late_rendezvous()
        return one.supervisor.failed

    add(one, {"started": True})
    assert [enter(rank, OPENING, 200.0) for rank in range(2)] == [[], []]
    assert enter(0, CONNECTING, 200.0) == []
    assert enter(1, CONNECTING, RENDEZVOUS_TIMEOUT_S - 1) == []
    connected = copy.deepcopy(one)
    assert enter(0, WARMING_UP, 2.0) == [0, 1]
    one, now = connected, now - 2.0
    assert [enter(rank, WARMING_UP, 0.5) for rank in range(2)] == [[], []]
    assert enter(0, WARMING_UP, 200.0) == []


def test_a_world_larger_than_the_launch_is_unsupported(alone: ElasticLauncher) -> None:
    outcome = run(alone, ranks_trial("ring", 3))
    assert (outcome.status, outcome.phase) == ("unsupported", "start")


# ---- two nodes -----------------------------------------------------------------------------------


def free_endpoint() -> tuple[str, int]:
    """Return a free port of the loopback interface: of IPv6, unless this machine has none."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as found:
            return "::1", found.getsockname()[1]
    except OSError:
        with socket.create_server(("127.0.0.1", 0)) as found:
            return "127.0.0.1", found.getsockname()[1]


class TwoNodes:
    """Node 0 in this process, node 1 in one of its own."""

    def __init__(self) -> None:
        self._host, self._port = free_endpoint()
        cluster = NodeInfo(2, 1, 0, self._host, self._port)
        self.node_0 = ElasticLauncher(cluster, ALPHA, KEY, PATIENCE_S)
        self.start()

    def start(self) -> None:
        """Start node 1, with a new token each time."""
        self.node_1 = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, self._host, str(self._port), uuid.uuid4().hex],
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def processes_of_node_1(self) -> list[psutil.Process]:
        """Node 1's agents and ranks, if a trial is under way: its fork server's children."""
        below = psutil.Process(self.node_1.pid).children()
        return [child for server in below for child in server.children(recursive=True)]

    def run(self, of: Trial, on_phase: OnPhase = ignore) -> Outcome:
        return run(self.node_0, of, on_phase)

    def attempt(self, of: Trial, on_phase: OnPhase) -> Outcome:
        """Run a trial once. A trial that loses a node would run once more."""
        return self.node_0._attempt(of, on_phase)[0]

    def channel(self) -> Channel:
        """Return the channel to node 1, which connects again if it is cut."""
        assert self.node_0._server
        return self.node_0._server.links[1].channel


@pytest.fixture(scope="module")
def two(launcher: LocalLauncher) -> Iterator[TwoNodes]:
    launcher.catalogue()
    with ExitStack() as stack:
        both = TwoNodes()
        stack.callback(lambda: both.node_1.kill())
        stack.enter_context(both.node_0)
        both.run(ranks_trial("ring"))
        yield both
        stack.pop_all().close()
    both.node_1.kill()
    both.node_1.wait()


def test_two_nodes_share_a_trial(two: TwoNodes, nothing_left: None) -> None:
    found = set()

    def look() -> None:
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            connections = process.net_connections()
            found.update(c.laddr.ip for c in connections if c.status == "LISTEN")

    outcome = two.run(ranks_trial("ring"), in_forward(look))
    # the control channel, torch's store and gloo: at no address that other hosts reach
    assert found
    assert found <= {two._host, "127.0.0.1"}
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
def test_a_rank_of_the_other_node_is_named(
    two: TwoNodes, name: str, status: str, reason: str
) -> None:
    outcome = two.run(ranks_trial(name))
    assert (outcome.status, outcome.reason, outcome.phase) == (status, reason, "forward")
    assert "onnection" in outcome.facts["ranks"]["0"]
    assert two.processes_of_node_1() == []


def test_a_stopped_rank_of_the_other_node_is_diagnosed(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if this node reads its stacks later: the stopped rank must not yet have continued."""

    def slowly(*args: Any) -> Any:
        samples = sample_processes(*args)
        time.sleep(0.1)
        return samples

    monkeypatch.setattr(host_agent, "sample_processes", slowly)
    outcome = two.run(ranks_trial("rank-stops", time_budget=0.5))
    assert outcome.status == "hang"
    assert "rank 1 (host beta) is stopped (SIGSTOP)" in (outcome.reason or "")
    stacks = outcome.facts["stacks"]
    assert "misbehaving" in stacks["1"][0]
    assert any(line.endswith(WAIT_FOR_PEERS) for line in stacks["0"])
    assert not any("elastic_ranks" in line for line in stacks["1"])
    assert two.processes_of_node_1() == []


def test_processes_left_on_the_other_node_are_killed_and_named(two: TwoNodes) -> None:
    outcome = two.run(ranks_trial("rank-grandchild"))
    assert outcome.status == "ok"
    assert "left 1 process(es) behind, killed: python" in (outcome.reason or "")
    assert "on beta" in (outcome.reason or "")
    assert two.processes_of_node_1() == []


def test_a_world_of_one_runs_on_node_0(two: TwoNodes) -> None:
    outcome = two.run(ranks_trial("ring", 1))
    assert (outcome.status, outcome.facts["hosts"]) == ("ok", ["alpha"])


def test_ranks_share_the_cores_of_their_own_host(two: TwoNodes) -> None:
    outcome = two.run(ranks_trial("rank-counts-threads", threads=None))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert f"{cores} thread(s)" in (outcome.reason or "")


def test_a_short_interruption_of_the_connection_changes_nothing(two: TwoNodes) -> None:
    def pause() -> None:
        two.node_1.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        two.node_1.send_signal(signal.SIGCONT)

    assert two.run(ranks_trial("ring"), in_forward(pause)).status == "ok"


def test_a_silent_node_ends_its_trial_but_not_the_next(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a cable is cut: the connection stays open, and no byte arrives."""
    monkeypatch.setattr(elastic, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(control_channel, "LOST_S", 1.5)
    monkeypatch.setattr(rank_supervisor, "PEERS_S", 0.2)
    stop = in_forward(lambda: two.node_1.send_signal(signal.SIGSTOP))
    outcome = two.attempt(ranks_trial("rank-waits", time_budget=60), stop)
    two.node_1.send_signal(signal.SIGCONT)
    assert outcome.status == "error"
    assert "rank 1 (host beta): no message from node 1 (beta) for " in (outcome.reason or "")
    assert two.run(ranks_trial("ring")).status == "ok"
    assert two.processes_of_node_1() == []


def test_a_peer_of_a_rank_on_a_silent_node_is_not_blamed(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer reports the closed connection at once; the loss of the host is known later."""
    monkeypatch.setattr(elastic, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(rank_supervisor, "CAUSE_S", 1.0)
    monkeypatch.setattr(control_channel, "LOST_S", 2.0)
    monkeypatch.setattr(elastic, "SILENT_S", 0.8)

    def lose() -> None:
        two.node_1.send_signal(signal.SIGSTOP)
        for process in two.processes_of_node_1():
            with suppress(psutil.NoSuchProcess):  # a rank ends with its agent
                process.kill()

    try:
        outcome = two.attempt(ranks_trial("rank-waits", time_budget=60), in_forward(lose))
    finally:
        two.node_1.send_signal(signal.SIGCONT)
    assert outcome.facts["ranks"]["0"].startswith("error in forward: ")
    assert "rank 1 (host beta): no message from node 1 (beta) for " in (outcome.reason or "")


def test_a_broken_connection_ends_the_ranks_on_both_nodes(two: TwoNodes) -> None:
    break_connection = in_forward(lambda: two.channel().disconnect("the test broke it"))
    outcome = two.attempt(ranks_trial("rank-waits", time_budget=60), break_connection)
    assert outcome.status == "error"
    end = time.monotonic() + SOON_S
    while two.processes_of_node_1() and time.monotonic() < end:
        time.sleep(0.05)
    assert two.processes_of_node_1() == []


def test_a_trial_that_lost_its_node_runs_once_more(two: TwoNodes) -> None:
    """When the node has connected again."""
    cut = in_forward(lambda: two.channel().disconnect("the test cut it"), "start")
    outcome = two.run(ranks_trial("ring"), cut)
    assert (outcome.status, outcome.facts.get("first_attempt")) == (
        "ok", "rank 1 (host beta): node 1 (beta) is gone: the test cut it",
    )  # fmt: skip


def test_a_lost_node_has_the_full_timeout_once_and_can_be_replaced(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = two.attempt(ranks_trial("rank-waits", time_budget=60), in_forward(two.node_1.kill))
    assert (outcome.status, is_environment_failure(outcome)) == ("error", True)
    assert re.fullmatch(
        r"rank 1 \(host beta\): node 1 \(beta\) is gone: "
        r"(it closed the connection|connection reset by peer)",  # with something unread in it
        outcome.reason or "",
    )
    monkeypatch.setattr(two.node_0, "_timeout_s", 0.6)
    monkeypatch.setattr(elastic, "SHORT_TIMEOUT_S", 0.2)
    for timeout_s in (0.6, 0.2):
        missing = two.run(ranks_trial("ring"))
        # the node says nothing about the trial, which has to run again
        assert is_environment_failure(missing)
        assert (missing.reason or "").endswith(f"the trial waited {timeout_s} s for it")
    monkeypatch.setattr(elastic, "SHORT_TIMEOUT_S", SOON_S)
    two.start()
    assert two.run(ranks_trial("ring")).status == "ok"


def test_ctrl_c_on_one_node_interrupts_all(two: TwoNodes) -> None:
    """The last test of this module: it ends node 1."""
    interrupt = in_forward(lambda: two.node_1.send_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="on node 1"):
        two.run(ranks_trial("rank-waits", time_budget=60), interrupt)
    assert two.node_1.wait(SOON_S) == 130
