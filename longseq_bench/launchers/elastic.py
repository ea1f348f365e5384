"""Launcher for many hosts: on each, torch's elastic agent starts the ranks of every trial.

Node 0 plans the trials. It sends the other nodes their jobs over the control channel
(control_channel.py). Every node starts and follows its own ranks (host_agent.py) and reports to
node 0, where one RankSupervisor decides the outcome. A lost node ends the trial, not the launch;
the trial runs once more when the node is back, else a later command runs it again.

Messages over the channel, in order (N: another node; control_messages.py has their models):

    N -> 0  {"node": 1, "host": ..., "token": ..., "must_match": {...}}     a NodeIdentity
    0 -> N  a NodeIdentity, or {"refused": reason}
    N -> 0  {"ready": devices}, or {"unavailable": reason}                  torch is loaded
    0 -> N  {"start": HostJob}                                              start a trial's ranks
    N -> 0  {"run_id": ..., "event": {...}}                                 see host_agent.py
    0 -> N  {"inspect": run_id}                                             the trial is late
    N -> 0  {"run_id": ..., "inspection": {"samples": ..., "stacks": ...}}
    0 -> N  {"end": run_id, "outcome": {...}}                               end the ranks
    N -> 0  {"run_id": ..., "orphans": [...]}                               processes that were left
    0 -> N  {"shutdown": reason, "interrupted": false}                      the launch is over

At any time: {"heartbeat": time} from both, and {"interrupted": true} from N after Ctrl-C there.

A node checks every start against its own command (own_command.py). Node 0 takes reports about a
node's own ranks only, and corrects their times by the difference of the two clocks.
"""

from __future__ import annotations

import math
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from typing_extensions import override

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.cluster_env import LOOPBACK, NodeInfo, split
from longseq_bench.core.environment_failure import environment_failure
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import Outcome, Phase, Trial
from longseq_bench.core.rank_start import CONNECTING, OPENING
from longseq_bench.launchers import control_channel
from longseq_bench.launchers.base import LAUNCHERS, LaunchSettings, OnPhase
from longseq_bench.launchers.control_channel import (
    HEARTBEAT_S,
    Channel,
    ControlServer,
    NodeLink,
    wait_ready,
)
from longseq_bench.launchers.control_messages import (
    EVENTS,
    Event,
    Failed,
    Inspection,
    Interrupted,
    NodeEvent,
    NodeIdentity,
    NodeInspection,
    NodeOrphans,
    PhaseReport,
    RankExit,
    RankLostPeer,
    RankReport,
    Ready,
    Started,
    Unavailable,
)
from longseq_bench.launchers.helper_start import lacks_descriptors
from longseq_bench.launchers.host_agent import HostJob, HostRanks
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.launchers.process_inspection import SAMPLE_S, STACKS_S, with_orphans_named
from longseq_bench.launchers.rank_supervisor import PHASE_LIMIT_S, ProcessSample, RankSupervisor

RENDEZVOUS_TIMEOUT_S = 120.0
"""Time limit for ranks to connect to each other, from when the last of them begins to."""

SILENT_S = 2.5 * HEARTBEAT_S
"""A node that is silent for this long may be lost; until that is decided, a trial goes on."""

SHORT_TIMEOUT_S = 1.0
"""Time limit for a node that an earlier trial did not get, and for nodes to disconnect."""

END_TIMEOUT_S = 5.0
"""Time limit for the other nodes to end their ranks."""

Log = Callable[[str], None]
A = TypeVar("A", NodeInspection, NodeOrphans)


@LAUNCHERS.register("elastic")
class ElasticLauncher(LocalLauncher):
    """The launcher of node 0, for all hosts of a launch.

    A smaller world takes the first hosts: node 0 alone, or complete hosts.
    """

    def __init__(
        self, cluster: NodeInfo, identity: NodeIdentity, key: bytes, timeout_s: float,
        log: Log = print,
    ) -> None:  # fmt: skip
        super().__init__()
        self.cluster, self._identity, self._timeout_s, self._log = cluster, identity, timeout_s, log
        self._host_ranks = HostRanks(self.context)
        self._server = ControlServer(cluster, identity, key) if cluster.nodes > 1 else None
        self._timed_out_nodes: set[int] = set()
        self._ready_channels: set[Channel] = set()
        self._run_count = 0

    @classmethod
    def create(cls, settings: LaunchSettings) -> ElasticLauncher:
        """Build the launcher of node 0."""
        identity = settings.identity or NodeIdentity(
            node=0, host=socket.gethostname(), token=uuid.uuid4().hex
        )
        return cls(settings.cluster, identity, settings.key, settings.timeout_s, settings.log)

    def __enter__(self) -> ElasticLauncher:
        try:
            self._wait_for_all_nodes()
        except BaseException as error:
            self._shut_down(error)
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self._shut_down(raised[1])

    def catalogue(self, own: Any = ()) -> Catalogue:
        """Return the catalogue of this host, with the CUDA devices of all hosts (assumed equal).

        CUDA is unavailable if two ranks would share a GPU.
        """
        return catalogue_of_launch(super().catalogue(own), self.cluster)

    def _wait_for_all_nodes(self) -> None:
        """Wait for the other nodes. Raises UserError if one does not connect in time."""
        if not self._server:
            return
        cluster = self.cluster
        others = range(1, cluster.nodes)
        if self._server.wait_for_nodes(others, control_channel.RETRY_S):
            self._log(f"node 0: waiting at {cluster.endpoint} for {cluster.nodes - 1} more")
        if missing := self._server.wait_for_nodes(others, self._timeout_s):
            raise UserError(self._server.describe_missing(missing, self._timeout_s))
        hosts = [link.identity.host for _, link in sorted(self._server.links.items())]
        names = ", ".join([self._identity.host, *hosts])
        ranks = cluster.ranks_per_node
        self._log(f"node 0: {cluster.nodes} nodes, {ranks} rank(s) on each: {names}")

    def _shut_down(self, error: BaseException | None) -> None:
        """Tell the other nodes why the launch ends, and close the connections."""
        self._host_ranks.end()
        if not self._server:
            return
        reason = str(error) if isinstance(error, (UserError, LauncherError)) else ""
        links = [link for link in self._server.links.values() if not link.lost_reason]
        for link in links:
            link.channel.send(shutdown=reason, interrupted=isinstance(error, KeyboardInterrupt))
        # let them close first, so that the last messages arrive
        end, channels = time.monotonic() + SHORT_TIMEOUT_S, [link.channel for link in links]
        while channels and time.monotonic() < end:
            wait_ready(channels, HEARTBEAT_S / 4)
            channels = [channel for channel in channels if not channel.disconnect_reason]
        self._server.close()

    # ---- one trial -----------------------------------------------------------------------------

    @override
    def _find_obstacle(self, trial: Trial) -> str:
        """Wait for the nodes of a trial. Returns why it can't start now, or an empty string."""
        self._read_messages()
        with suppress(ValueError):  # such a trial is unsupported
            if reason := self._wait_for_nodes(range(1, split(trial.world_size, self.cluster)[0])):
                return reason
        return lacks_descriptors(min(trial.world_size, self.cluster.ranks_per_node))

    @override
    def _attempt(self, trial: Trial, on_phase: OnPhase) -> tuple[Outcome, int]:
        try:
            nodes, ranks_per_node = split(trial.world_size, self.cluster)
        except ValueError as error:
            return Outcome(status="unsupported", reason=str(error), phase="start"), 0
        # also a second attempt, after a node was lost in the first
        if reason := self._find_obstacle(trial):
            return environment_failure(reason, "start"), 0
        links = {node: self._server.links[node] for node in range(1, nodes)} if self._server else {}
        self._wait_until_ready(links.values())
        self._run_count += 1
        # the address that the other nodes reached: a name may not resolve the same everywhere
        address = links[1].channel.address if links else LOOPBACK
        job = HostJob(
            run_id=f"{self._identity.token}-{self._run_count}",
            trial=trial.model_dump(mode="json"), nodes=nodes, ranks_per_node=ranks_per_node,
            host=address, port=_free_port(address), timeout_s=self._timeout_s, address=address,
        )  # fmt: skip
        hosts = [self._identity.host, *(link.identity.host for link in links.values())]
        supervisor = RankSupervisor(trial, time.monotonic(), _rank_namer(hosts, ranks_per_node))
        run = _Run(job, supervisor, self._host_ranks, links, self._identity.host, on_phase)
        outcome = None
        try:
            run.follow()
            outcome = supervisor.outcome()
        finally:
            orphans = run.end(outcome)
        facts = {**outcome.facts, "launcher": "torch elastic", "hosts": hosts}
        outcome = outcome.model_copy(update={"facts": facts})
        return with_orphans_named(outcome, orphans), supervisor.signal_number

    def _wait_for_nodes(self, nodes: Iterable[int]) -> str:
        """Wait for missing nodes. Returns why the trial can't start, or an empty string.

        Only the first trial waits the full timeout for a node; later ones wait SHORT_TIMEOUT_S.
        """
        if not self._server:
            return ""
        missing = self._server.wait_for_nodes(nodes, 0.0)
        timeout_s = self._timeout_s if set(missing) - self._timed_out_nodes else SHORT_TIMEOUT_S
        if missing and timeout_s > SHORT_TIMEOUT_S:
            names = ", ".join(map(str, missing))
            self._log(f"node 0: lost node {names}; waiting at most {timeout_s:.3g} s for it")
        missing = self._server.wait_for_nodes(missing, timeout_s)
        self._timed_out_nodes = (self._timed_out_nodes - set(nodes)) | set(missing)
        if not missing:
            return ""
        link = self._server.links.get(missing[0])
        reason = (link and link.lost_reason) or f"node {missing[0]} is missing"
        return f"{reason}; the trial waited {timeout_s:.3g} s for it"

    def _wait_until_ready(self, links: Iterable[NodeLink]) -> None:
        """Wait until the other nodes have torch loaded. Raises LauncherError if one can't."""
        end = time.monotonic() + PHASE_LIMIT_S
        for link in links:
            while link.channel not in self._ready_channels and not link.lost_reason:
                if time.monotonic() >= end:
                    return
                wait_ready([link.channel], HEARTBEAT_S)
                self._read_messages()

    def _read_messages(self) -> None:
        """Process messages of other nodes between trials."""
        for link in self._server.links.values() if self._server else ():
            for message in link.channel.receive():
                _check_interrupted(link, message)
                if isinstance(message, Unavailable):
                    raise LauncherError(f"{link.identity}: {message.unavailable}")
                if isinstance(message, Ready):
                    self._ready_channels.add(link.channel)


def catalogue_of_launch(here: Catalogue, cluster: NodeInfo) -> Catalogue:
    """Return a host's catalogue with the CUDA devices of all hosts, which are assumed equal.

    CUDA is unavailable if two ranks would share a GPU.
    """
    cuda, ranks = here.devices["cuda"], cluster.ranks_per_node
    changes: dict[str, Any] = {"count": ranks * cluster.nodes}
    if ranks > cuda.count and not cuda.unavailable:
        reason = f"{ranks} ranks on a host with {cuda.count} GPU(s), and two can't share one"
        remedy = f"use --nproc-per-node {cuda.count}"
        changes = {"unavailable": reason, "remedy": remedy}
    devices = here.devices | {"cuda": cuda.model_copy(update=changes)}
    return here.model_copy(update={"devices": devices})


@dataclass
class _Run:
    """One trial on this node and those of `links`.

    host: the name of this host. started: nodes whose ranks run.
    phases: the last phase of each rank that reported, and its part.
    lost_nodes: reported to the supervisor.
    """

    job: HostJob
    supervisor: RankSupervisor
    host_ranks: HostRanks
    links: dict[int, NodeLink]
    host: str
    on_phase: OnPhase
    started: set[int] = field(default_factory=set)
    phases: dict[int, tuple[Phase, str]] = field(default_factory=dict)
    lost_nodes: set[int] = field(default_factory=set)

    def follow(self) -> None:
        """Start the ranks; pass events to the supervisor until the trial is done or diagnosed."""
        for node, link in self.links.items():
            link.channel.send(start=asdict(replace(self.job, node=node)))
        self.host_ranks.start(self.job)
        self._rendezvous_deadline = time.monotonic() + self.job.timeout_s + HEARTBEAT_S
        while True:
            remaining_s = self.supervisor.deadline - time.monotonic()
            # if the cause may still come, wait until the silent node answers or is lost
            timeout_s = min(remaining_s, HEARTBEAT_S) if remaining_s > 0 else HEARTBEAT_S / 10
            start_s = time.monotonic()
            ready = wait_ready([*self.host_ranks.handles, *self._channels()], timeout_s)
            self.supervisor.add_wait(timeout_s, time.monotonic() - start_s)
            for event in self.host_ranks.events(ready):
                self._add_event(0, EVENTS.validate_python(event))
            for node, link in self.links.items():
                for message in link.channel.receive():
                    _check_interrupted(link, message)
                    if isinstance(message, NodeEvent) and message.run_id == self.job.run_id:
                        self._add_event(node, message.event)
            self._fail_lost_nodes()
            self._fail_late_rendezvous()
            now = time.monotonic()
            if self.supervisor.is_done(now) and not self._is_cause_pending():
                return
            if self.supervisor.is_late(now):
                self._diagnose()
                return

    def _channels(self) -> list[Channel]:
        """Return the channels to the nodes that are not lost."""
        return [link.channel for link in self.links.values() if not link.lost_reason]

    def _add_event(self, node: int, event: Event) -> None:
        """Process an event of a node's ranks (host_agent.py)."""
        now = time.monotonic()
        clock_offset_ns = self.links[node].channel.clock_offset_ns if node else 0
        if isinstance(event, Failed):
            reason = f"{event.failed} (ranks meet at {self.job.store})"
            self._fail(node, reason, event.environment)
        elif isinstance(event, Started):
            self.started.add(node)
            if len(self.started) == self.job.nodes:
                # the supervisor limits the time until they try to connect
                self._rendezvous_deadline = math.inf
        elif event.rank not in self._ranks_of(node):
            self.links[node].channel.disconnect(
                f"it reported rank {event.rank}, not one of its own"
            )
        elif isinstance(event, RankReport):
            self._add_report(event, now, clock_offset_ns)
        elif isinstance(event, RankExit):
            at = event.at + clock_offset_ns
            self.supervisor.add_exit(event.rank, event.exit, event.printed, event.killed, now, at)
        elif isinstance(event, RankLostPeer):
            facts = {"lost_peer": True}
            outcome = Outcome(status="error", reason=event.lost_peer, facts=facts)
            self.supervisor.add_outcome(event.rank, outcome, now, event.at + clock_offset_ns)

    def _ranks_of(self, node: int) -> range:
        """Return the global ranks of a node."""
        return replace(self.job, node=node).ranks

    def _add_report(self, event: RankReport, now: float, clock_offset_ns: int) -> None:
        """Process a phase or the outcome of a rank."""
        rank, report = event.rank, event.message
        if isinstance(report, PhaseReport):
            self._enter_phase(rank, report.phase, report.part, now)
            self.supervisor.add_message(rank, dict(report), now)
            if rank == 0:
                self.on_phase(report.phase, report.part)
        else:
            self.supervisor.add_outcome(rank, report.outcome, now, report.at + clock_offset_ns)

    def _enter_phase(self, rank: int, phase: Phase, part: str, now: float) -> None:
        """Note a rank's phase; when the last rank tries to connect, limit the time for that."""
        self.phases[rank] = phase, part
        waits = [known != ("start", OPENING) for known in self.phases.values()]
        if part == CONNECTING and len(waits) == self.supervisor.trial.world_size and all(waits):
            self._rendezvous_deadline = now + RENDEZVOUS_TIMEOUT_S

    def _fail(self, node: int, reason: str, is_environment: bool = False) -> None:
        """Set the outcome of a node's ranks that have none yet."""
        for rank in self._ranks_of(node):
            phase, _ = self.phases.get(rank, ("start", ""))
            outcome = Outcome(status="error", reason=reason, phase=phase)
            if is_environment:
                outcome = environment_failure(reason, phase)
            self.supervisor.add_outcome(rank, outcome, time.monotonic(), time.time_ns())

    def _fail_lost_nodes(self) -> None:
        for node, link in self.links.items():
            if reason := link.lost_reason:
                self._fail(node, reason, is_environment=True)
                self.lost_nodes.add(node)

    def _fail_late_rendezvous(self) -> None:
        """Fail ranks that did not connect to each other in time, as when a firewall blocks them."""
        connected = [known[1] not in (OPENING, CONNECTING) for known in self.phases.values()]
        are_connected = len(connected) == self.supervisor.trial.world_size and all(connected)
        if are_connected or time.monotonic() < self._rendezvous_deadline:
            return
        question = "do the hosts reach each other at every port?"
        nodes = set(range(self.job.nodes))
        for node in nodes - self.started or nodes:
            self._fail(node, f"the ranks did not meet at {self.job.store}; {question}")

    def _is_cause_pending(self) -> bool:
        """Return whether all failures are lost peers so far, and a silent node may be the cause."""
        silent = {n for n, link in self.links.items() if link.channel.silent_s() > SILENT_S}
        # ask the supervisor, not the clock: a node may become lost at this very moment
        return bool(silent - self.lost_nodes and self.supervisor.outcome().facts.get("lost_peer"))

    def _diagnose(self) -> None:
        """Diagnose a trial that is late, from the ranks of all hosts."""
        for channel in self._channels():
            channel.send(inspect=self.job.run_id)
        # at the same time as the other nodes
        inspections = {0: Inspection.model_validate(self.host_ranks.inspect())}
        timeout_s = SAMPLE_S + STACKS_S + END_TIMEOUT_S
        for node, answer in self._collect_answers(NodeInspection, timeout_s).items():
            inspections[node] = answer.inspection

        def of_running(part: str) -> dict[int, Any]:
            by_rank = {
                rank: value
                for node, inspection in inspections.items()
                for rank, value in getattr(inspection, part).items()
                if rank in self._ranks_of(node)
            }
            return {rank: by_rank[rank] for rank in self.supervisor.running if rank in by_rank}

        samples = {rank: ProcessSample(*values) for rank, values in of_running("samples").items()}
        is_hang = self.supervisor.is_hang(samples)
        self.supervisor.diagnose(samples, of_running("stacks") if is_hang else {})

    def _collect_answers(self, kind: type[A], timeout_s: float) -> dict[int, A]:
        """Return one message of a kind, about this run, from each node that is not lost."""
        answers: dict[int, A] = {}
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            waiting = {
                link.channel: node
                for node, link in self.links.items()
                if node not in answers and not link.lost_reason
            }
            if not waiting:
                break
            for channel in wait_ready(waiting, HEARTBEAT_S):
                for message in channel.receive():
                    if isinstance(message, kind) and message.run_id == self.job.run_id:
                        answers[waiting[channel]] = message
        return answers

    def end(self, outcome: Outcome | None) -> list[str]:
        """End the ranks on every host. Returns the names of processes that they left.

        outcome: for the other nodes to show; None if the trial was interrupted.
        """
        summary = outcome.model_dump(mode="json", include={"status", "reason"}) if outcome else None
        # also to a lost node, which may connect again
        for link in self.links.values():
            link.channel.send(end=self.job.run_id, outcome=summary)
        orphans = self.host_ranks.end()
        orphans = [f"{name} on {self.host}" for name in orphans] if self.links else orphans
        answers = self._collect_answers(NodeOrphans, END_TIMEOUT_S).values()
        return [*orphans, *(name for answer in answers for name in answer.orphans)]


def _rank_namer(hosts: list[str], ranks_per_node: int) -> Callable[[int], str]:
    """Return a function that names a rank, with its host if there are several."""
    if len(hosts) == 1:
        return "rank {}".format
    share_a_name = max(Counter(hosts).values()) > 1

    def name(rank: int) -> str:
        node = rank // ranks_per_node
        return f"rank {rank} ({f'node {node}' if share_a_name else f'host {hosts[node]}'})"

    return name


def _check_interrupted(link: NodeLink, message: Any) -> None:
    """Raise KeyboardInterrupt if the other node was interrupted."""
    if isinstance(message, Interrupted):
        raise KeyboardInterrupt(f"on {link.identity}")


def _free_port(address: str) -> int:
    """Return a free port for a trial's store, which the agent opens a moment later."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])
