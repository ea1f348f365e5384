"""Launcher for many hosts: on each, torch's elastic agent starts the ranks of every trial.

Node 0 plans the trials. It sends the other nodes their jobs over the control channel
(control_channel.py). Every node starts and follows its own ranks (host_agent.py) and reports to
node 0, where one RankSupervisor decides the outcome. A lost node ends the trial, not the launch.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.cluster_env import LOOPBACK, NodeInfo
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import Outcome, Phase, Trial
from longseq_bench.launchers import control_channel
from longseq_bench.launchers.base import LAUNCHERS, LaunchSettings, OnPhase
from longseq_bench.launchers.control_channel import (
    BEAT_S,
    Channel,
    ControlServer,
    NodeIdentity,
    NodeLink,
    wait_ready,
)
from longseq_bench.launchers.host_agent import HostJob, HostRanks
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.launchers.process_inspection import SAMPLE_S, STACKS_S, with_orphans_named
from longseq_bench.launchers.rank_supervisor import PHASE_LIMIT_S, ProcessSample, RankSupervisor

MEET_S = 120.0
"""Time limit for ranks that have started to connect to each other."""

SILENT_S = 2.5 * BEAT_S
"""A node that is silent for this long may be lost. Until that is known no other cause is named."""

SHORT_S = 1.0
"""Time that a trial waits for a node which the trial before has waited for already."""

END_S = 5.0
"""Time limit for the other nodes to end their ranks."""

Log = Callable[[str], None]


@LAUNCHERS.register("elastic")
class ElasticLauncher(LocalLauncher):
    """The launcher of node 0, for all hosts of a launch.

    A smaller world takes the first hosts: node 0 alone, or complete hosts.
    """

    def __init__(
        self, site: NodeInfo, hello: NodeIdentity, patience: float, log: Log = lambda text: None
    ) -> None:
        super().__init__()
        self.site, self._hello, self._patience, self._log = site, hello, patience, log
        self._node = HostRanks(self._context)
        self._hub = ControlServer(site, hello) if site.nodes > 1 else None
        self._given_up: set[int] = set()
        self._ready: set[Channel] = set()
        self._runs = 0

    @classmethod
    def create(cls, settings: LaunchSettings) -> ElasticLauncher:
        """Build the launcher of node 0."""
        hello = settings.hello or NodeIdentity(0, socket.gethostname(), uuid.uuid4().hex)
        return cls(settings.site, hello, settings.patience, settings.log)

    def __enter__(self) -> ElasticLauncher:
        try:
            self._gather()
        except BaseException as error:
            self._part(error)
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self._part(raised[1])

    def catalogue(self) -> Catalogue:
        """Return the catalogue of this host, with the CUDA devices of all hosts (assumed alike)."""
        here = super().catalogue()
        cuda = here.devices["cuda"]
        count = min(cuda.count, self.site.per) * self.site.nodes
        devices = here.devices | {"cuda": cuda.model_copy(update={"count": count})}
        return here.model_copy(update={"devices": devices})

    def _gather(self) -> None:
        """Wait for the other nodes. Raises UserError if one does not come."""
        if not self._hub:
            return
        others = range(1, self.site.nodes)
        if self._hub.missing(others, control_channel.RETRY_S):
            self._log(f"node 0: waiting at {self.site.endpoint} for {self.site.nodes - 1} more")
        if away := self._hub.missing(others, self._patience):
            raise UserError(self._hub.describe_missing(away, self._patience))
        hosts = [link.hello.host for _, link in sorted(self._hub.links.items())]
        names = ", ".join([self._hello.host, *hosts])
        self._log(f"node 0: {self.site.nodes} nodes, {self.site.per} rank(s) on each: {names}")

    def _part(self, error: BaseException | None) -> None:
        """Send the other nodes the reason of the end, and close the connections."""
        self._node.end()
        if not self._hub:
            return
        why = str(error) if isinstance(error, (UserError, LauncherError)) else ""
        links = [link for link in self._hub.links.values() if not link.lost]
        for link in links:
            link.channel.send(over=why, interrupted=isinstance(error, KeyboardInterrupt))
        # let them close first, so that the last messages arrive
        end = time.monotonic() + SHORT_S
        while any(not link.channel.gone for link in links) and time.monotonic() < end:
            wait_ready([link.channel for link in links if not link.channel.gone], BEAT_S / 4)
        self._hub.close()

    # ---- one trial -----------------------------------------------------------------------------

    def _attempt(self, trial: Trial, on_phase: OnPhase) -> tuple[Outcome, int]:
        try:
            nodes, per = split(trial.world_size, self.site)
        except ValueError as error:
            return Outcome(status="unsupported", reason=str(error), phase="start"), 0
        self._read()
        if why := self._wait_for_nodes(range(1, nodes)):
            return Outcome(status="error", reason=why, phase="start"), 0
        links = {node: self._hub.links[node] for node in range(1, nodes)} if self._hub else {}
        self._await_ready(links.values())
        self._runs += 1
        job = HostJob(
            run=f"{self._hello.token}-{self._runs}", trial=trial.model_dump(mode="json"),
            nodes=nodes, per=per, host=self.site.host if links else LOOPBACK,
            port=_free_port(), patience=self._patience,
            address=links[1].channel.address if links else LOOPBACK,
        )  # fmt: skip
        hosts = [self._hello.host, *(link.hello.host for link in links.values())]
        supervisor = RankSupervisor(trial, time.monotonic(), _names(hosts, per))
        run = _Run(job, supervisor, self._node, links, self._hello.host, on_phase)
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
        """Wait for nodes that are away. Returns why the trial can't start, or an empty string.

        Only the first trial waits for a missing node with full patience.
        """
        if not self._hub:
            return ""
        away = self._hub.missing(nodes, 0.0)
        patience = self._patience if set(away) - self._given_up else SHORT_S
        away = self._hub.missing(away, patience)
        self._given_up = (self._given_up - set(nodes)) | set(away)
        if not away:
            return ""
        link = self._hub.links.get(away[0])
        why = link.lost if link else ""
        return f"{why or f'node {away[0]} is missing'}; the trial waited {patience:.3g} s for it"

    def _await_ready(self, links: Iterable[NodeLink]) -> None:
        """Wait until the other nodes have torch loaded. Raises LauncherError if one can't."""
        end = time.monotonic() + PHASE_LIMIT_S
        for link in links:
            while link.channel not in self._ready and not link.lost and time.monotonic() < end:
                wait_ready([link.channel], BEAT_S)
                self._read()

    def _read(self) -> None:
        """Process messages of other nodes between trials."""
        for link in self._hub.links.values() if self._hub else ():
            for message in link.channel.receive():
                _check_interrupted(link, message)
                if "unable" in message:
                    raise LauncherError(f"{link.hello}: {message['unable']}")
                if "ready" in message:
                    self._ready.add(link.channel)


def split(ranks: int, site: NodeInfo) -> tuple[int, int]:
    """Return the number of nodes for a world of that many ranks, and the ranks on each.

    Raises:
        ValueError: the ranks are more than there are, or can't be spread evenly.
    """
    if ranks <= site.per:
        return 1, ranks
    if ranks > site.ranks:
        raise ValueError(
            f"{ranks} ranks are more than the {site.ranks} of this launch, {site.per} on each of "
            f"{site.nodes} node(s)"
        )
    if ranks % site.per:
        raise ValueError(
            f"{ranks} ranks do not fill nodes of {site.per} ranks; use up to {site.per}, or a "
            f"multiple of {site.per}"
        )
    return ranks // site.per, site.per


@dataclass
class _Run:
    """One trial on this node and those of `links`.

    started: nodes whose ranks run. phases: the last phase of each rank that reported.
    lost: nodes whose loss the supervisor knows.
    """

    job: HostJob
    supervisor: RankSupervisor
    node: HostRanks
    links: dict[int, NodeLink]
    here: str
    on_phase: OnPhase
    started: set[int] = field(default_factory=set)
    phases: dict[int, Phase | None] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def follow(self) -> None:
        """Start the ranks; pass events to the supervisor until the trial is done or diagnosed."""
        for node, link in self.links.items():
            link.channel.send(order=asdict(replace(self.job, node=node)))
        self.node.start(self.job)
        self._meet_limit = time.monotonic() + self.job.patience + BEAT_S
        while True:
            left = self.supervisor.deadline - time.monotonic()
            # if the cause is in doubt, wait until the silent node answers or is lost
            left = min(left, BEAT_S) if left > 0 else BEAT_S / 10
            for event in self.node.events(
                wait_ready([*self.node.handles, *self._channels()], left)
            ):
                self._add_event(0, event)
            for node, link in self.links.items():
                for message in link.channel.receive():
                    _check_interrupted(link, message)
                    if message.get("run") == self.job.run and "news" in message:
                        self._add_event(node, message["news"])
            self._fail_lost_nodes()
            self._fail_late_meeting()
            now = time.monotonic()
            if self.supervisor.is_done(now) and not self._in_doubt():
                return
            if self.supervisor.is_late(now):
                self._diagnose()
                return

    def _channels(self) -> list[Channel]:
        """Return the channels to the nodes that are not lost."""
        return [link.channel for link in self.links.values() if not link.lost]

    def _add_event(self, node: int, event: dict[str, Any]) -> None:
        """Process an event of a node's ranks (host_agent.py)."""
        now, rank = time.monotonic(), event.get("rank", -1)
        if message := event.get("message"):
            self.phases[rank] = message.get("phase", self.phases.get(rank))
            self.supervisor.add_message(rank, message, now)
            if rank == 0 and "phase" in message:
                self.on_phase(message["phase"], message["part"])
        elif "exit" in event:
            printed, killed = event["printed"], event["killed"]
            self.supervisor.add_exit(rank, event["exit"], printed, killed, now, event["at"])
        elif "lost_peer" in event:
            facts = {"lost_peer": True}
            outcome = Outcome(status="error", reason=event["lost_peer"], facts=facts)
            self.supervisor.add_outcome(rank, outcome, now, event["at"])
        elif "failed" in event:
            self._fail(node, f"{event['failed']} (ranks meet at {self.job.store})")
        elif "started" in event:
            self.started.add(node)
            if len(self.started) == self.job.nodes:
                self._meet_limit = now + MEET_S

    def _fail(self, node: int, why: str) -> None:
        """Set the outcome of a node's ranks that have none yet."""
        for rank in replace(self.job, node=node).ranks:
            phase = self.phases.get(rank) or "start"
            outcome = Outcome(status="error", reason=why, phase=phase)
            self.supervisor.add_outcome(rank, outcome, time.monotonic(), time.time_ns())

    def _fail_lost_nodes(self) -> None:
        for node, link in self.links.items():
            if why := link.lost:
                self._fail(node, why)
                self.lost.add(node)

    def _fail_late_meeting(self) -> None:
        """Fail ranks that did not meet within the limit: the network blocks their connections."""
        have_met = len(self.phases) == self.supervisor.trial.world_size
        if have_met or time.monotonic() < self._meet_limit:
            return
        question = "do the hosts reach each other at every port?"
        nodes = set(range(self.job.nodes))
        for node in nodes - self.started or nodes:
            self._fail(node, f"the ranks did not meet at {self.job.store}; {question}")

    def _in_doubt(self) -> bool:
        """Return whether only lost peers are known, and a silent node may hold the cause."""
        silent = {n for n, link in self.links.items() if link.channel.silent_s() > SILENT_S}
        # ask the supervisor, not the clock: a node may become lost at this very moment
        return bool(silent - self.lost and self.supervisor.outcome().facts.get("lost_peer"))

    def _diagnose(self) -> None:
        """Diagnose a trial that is late, from the ranks of all hosts."""
        for channel in self._channels():
            channel.send(look=self.job.run)
        reports = [self.node.inspect(), *self._answers("looked", SAMPLE_S + STACKS_S + END_S)]

        def of_running(kind: str) -> dict[int, Any]:
            found = {int(rank): one for report in reports for rank, one in report[kind].items()}
            return {rank: found[rank] for rank in self.supervisor.running if rank in found}

        samples = {rank: ProcessSample(*one) for rank, one in of_running("samples").items()}
        hangs = self.supervisor.is_hang(samples)
        self.supervisor.diagnose(samples, of_running("stacks") if hangs else {})

    def _answers(self, name: str, seconds: float) -> list[Any]:
        """Return the answers of that name from all other nodes that are not lost."""
        found, waiting, end = [], set(self._channels()), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for channel in wait_ready(waiting, BEAT_S):
                for message in channel.receive():
                    if message.get("run") == self.job.run and name in message:
                        found.append(message[name])
                        waiting.discard(channel)
            waiting &= set(self._channels())
        return found

    def end(self, outcome: Outcome | None) -> list[str]:
        """End the ranks on every host. Returns the names of processes that they left.

        outcome: for the other nodes to show; None if the trial was interrupted.
        """
        summary = outcome.model_dump(mode="json", include={"status", "reason"}) if outcome else None
        # also to a lost node, which may come back
        for link in self.links.values():
            link.channel.send(end=self.job.run, outcome=summary)
        orphans = self.node.end()
        orphans = [f"{name} on {self.here}" for name in orphans] if self.links else orphans
        return [*orphans, *chain.from_iterable(self._answers("ended", END_S))]


def _names(hosts: list[str], per: int) -> Callable[[int], str]:
    """Return a function that names a rank, with its host if there are several."""
    if len(hosts) == 1:
        return "rank {}".format
    several = max(Counter(hosts).values()) > 1

    def name(rank: int) -> str:
        node = rank // per
        return f"rank {rank} (node {node})" if several else f"rank {rank} (host {hosts[node]})"

    return name


def _check_interrupted(link: NodeLink, message: dict[str, Any]) -> None:
    """Raise KeyboardInterrupt if the other node was interrupted."""
    if "interrupted" in message:
        raise KeyboardInterrupt(f"on {link.hello}")


def _free_port() -> int:
    """Return a free port for a trial's store, which the agent opens a moment later."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
