"""Many hosts: on each one torch's own elastic agent starts the ranks of every trial anew.

Node 0 plans the trials. It sends the other nodes their jobs over the control channel
(control_channel.py). Every node starts and follows its own ranks (host_agent.py) and reports to
node 0, where one RankSupervisor decides the outcome. A lost node ends the trial, not the plan.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.cluster_env import LOOPBACK, Site
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import Outcome, Phase, Trial
from longseq_bench.launchers import control_channel
from longseq_bench.launchers.base import LAUNCHERS, LaunchSettings, OnPhase
from longseq_bench.launchers.control_channel import (
    BEAT_S,
    Channel,
    ControlServer,
    Hello,
    NodeLink,
    join,
    ready,
)
from longseq_bench.launchers.host_agent import HostJob, HostRanks
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.launchers.process_inspection import LOOK_S, STACKS_S, with_orphans_named
from longseq_bench.launchers.rank_supervisor import PHASE_LIMIT_S, ProcessSample, RankSupervisor

MEET_S = 120.0
"""How long ranks that are there may take to connect to each other and begin."""

SILENT_S = 2.5 * BEAT_S
"""A node that was not heard for so long may be lost: nobody else is blamed before it is."""

SHORT_S = 1.0
"""How long a trial waits for a node that the one before has waited for in vain."""

END_S = 5.0
"""How long other nodes may take to end their ranks."""

Tell = Callable[[str], None]
OnTrial = Callable[[int, Trial, Outcome], None]
"""Told by a node that follows: which trial this was, and what it came to as far as it knows."""


@LAUNCHERS.register("elastic")
class ElasticLauncher(LocalLauncher):
    """Launcher for the hosts of a launch; of node 0. A world smaller than all of them takes the
    first hosts: as many ranks as it has on node 0 alone, or whole hosts."""

    def __init__(
        self, site: Site, hello: Hello, patience: float, tell: Tell = lambda text: None
    ) -> None:
        super().__init__()
        self.site, self._hello, self._patience, self._tell = site, hello, patience, tell
        self._node = HostRanks(self._context)
        self._hub = ControlServer(site, hello) if site.nodes > 1 else None
        self._given_up: set[int] = set()
        self._ready: set[Channel] = set()
        self._runs = 0

    @classmethod
    def create(cls, settings: LaunchSettings) -> ElasticLauncher:
        """Build the launcher of node 0."""
        hello = settings.hello or Hello(0, socket.gethostname(), uuid.uuid4().hex)
        return cls(settings.site, hello, settings.patience, settings.log)

    def __enter__(self) -> ElasticLauncher:
        try:
            self._gather()
        except BaseException as error:
            self._part(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._part(error)

    def catalogue(self) -> Catalogue:
        """Of this host, with the CUDA devices of all together: they are meant to be alike."""
        here = super().catalogue()
        cuda = here.devices["cuda"]
        count = min(cuda.count, self.site.per) * self.site.nodes
        devices = here.devices | {"cuda": cuda.model_copy(update={"count": count})}
        return here.model_copy(update={"devices": devices})

    def _gather(self) -> None:
        """Wait for the other nodes. Raises UserError where one does not come."""
        if not self._hub:
            return
        others = range(1, self.site.nodes)
        if self._hub.missing(others, control_channel.RETRY_S):
            self._tell(f"node 0: waiting at {self.site.endpoint} for {self.site.nodes - 1} more")
        if away := self._hub.missing(others, self._patience):
            raise UserError(self._hub.who_is_missing(away, self._patience))
        hosts = sorted((link.hello.node, link.hello.host) for link in self._hub.links)
        names = ", ".join([self._hello.host, *(host for _, host in hosts)])
        self._tell(f"node 0: {self.site.nodes} nodes, {self.site.per} rank(s) on each: {names}")

    def _part(self, error: BaseException | None) -> None:
        """Tell the others how it ended, and hang up."""
        self._node.end()
        if not self._hub:
            return
        why = str(error) if isinstance(error, (UserError, LauncherError)) else ""
        links = [link for link in self._hub.links if not link.lost]
        for link in links:
            link.channel.send(over=why, interrupted=isinstance(error, KeyboardInterrupt))
        # they hang up first, so that nothing of what was said last is cut off
        end = time.monotonic() + SHORT_S
        while any(not link.channel.gone for link in links) and time.monotonic() < end:
            ready([link.channel for link in links if not link.channel.gone], BEAT_S / 4)
        self._hub.close()

    # ---- one trial -----------------------------------------------------------------------------

    def _attempt(self, trial: Trial, on_phase: OnPhase) -> tuple[Outcome, int]:
        try:
            nodes, per = split(trial.world_size, self.site)
        except ValueError as error:
            return Outcome(status="unsupported", reason=str(error), phase="start"), 0
        self._read()
        if why := self._waited_in_vain(range(1, nodes)):
            return Outcome(status="error", reason=why, phase="start"), 0
        links = self._links(nodes)
        self._await_ready(links.values())
        self._runs += 1
        order = HostJob(
            run=f"{self._hello.token}-{self._runs}", trial=trial.model_dump(mode="json"),
            nodes=nodes, per=per, host=self.site.host if links else LOOPBACK,
            port=_free_port(), patience=self._patience,
            address=links[1].channel.address if links else LOOPBACK,
        )  # fmt: skip
        hosts = [self._hello.host, *(link.hello.host for link in links.values())]
        supervisor = RankSupervisor(trial, time.monotonic(), _names(hosts, per))
        run = _Run(order, supervisor, self._node, links, self._hello.host)
        outcome = None
        try:
            run.start(on_phase)
            run.follow()
            outcome = run.supervisor.outcome()
        finally:
            orphans = run.end(outcome)
        facts = {**outcome.facts, "launcher": "torch elastic", "hosts": hosts}
        outcome = outcome.model_copy(update={"facts": facts})
        return with_orphans_named(outcome, orphans), run.supervisor.signal_number

    def _links(self, nodes: int) -> dict[int, NodeLink]:
        found = {n: self._hub.link(n) for n in range(1, nodes)} if self._hub else {}
        return {node: link for node, link in found.items() if link}

    def _waited_in_vain(self, nodes: Iterable[int]) -> str:
        """Why a trial can't start: a node that is away. The first time it is waited for in full."""
        if not self._hub:
            return ""
        away = self._hub.missing(nodes, 0.0)
        new = set(away) - self._given_up
        patience = self._patience if new else SHORT_S
        away = self._hub.missing(away, patience)
        self._given_up = (self._given_up - set(nodes)) | set(away)
        if not away:
            return ""
        link = self._hub.link(away[0])
        why = link.lost if link else ""
        return f"{why or f'node {away[0]} is away'}; the trial waited {patience:.3g} s for it"

    def _await_ready(self, links: Iterable[NodeLink]) -> None:
        """Wait until the other nodes have torch loaded. Raises LauncherError where one can't."""
        end = time.monotonic() + PHASE_LIMIT_S
        for link in links:
            while link.channel not in self._ready and not link.lost and time.monotonic() < end:
                ready([link.channel], BEAT_S)
                self._read()

    def _read(self) -> None:
        """Hear what other nodes say between trials."""
        for link in self._hub.links if self._hub else ():
            for message in link.channel.receive():
                _check_interrupted(link, message)
                if "unable" in message:
                    raise LauncherError(f"{link.hello}: {message['unable']}")
                if "ready" in message:
                    self._ready.add(link.channel)


def split(ranks: int, site: Site) -> tuple[int, int]:
    """On how many nodes a world of so many ranks runs, and how many ranks each starts. Raises
    ValueError where it would have to be spread unevenly, or is more than there are."""
    if ranks <= site.per:
        return 1, ranks
    if ranks > site.ranks:
        raise ValueError(
            f"{ranks} ranks are more than the {site.ranks} of this launch, {site.per} on each of "
            f"{site.nodes} node(s)"
        )
    if ranks % site.per:
        raise ValueError(
            f"{ranks} ranks are no whole number of nodes with {site.per} each; up to {site.per}, "
            f"or a multiple of it, can be run"
        )
    return ranks // site.per, site.per


@dataclass
class _Run:
    """One trial on its nodes: this one and those of `links`."""

    order: HostJob
    supervisor: RankSupervisor
    node: HostRanks
    links: dict[int, NodeLink]
    here: str
    on_phase: OnPhase = lambda phase, part: None
    started: set[int] = field(default_factory=set)
    phases: dict[int, Phase | None] = field(default_factory=dict)
    """Nodes whose ranks are there, and which phase each rank was in when it was heard last."""
    lost: set[int] = field(default_factory=set)
    """Nodes whose loss the supervisor was told of."""

    def start(self, on_phase: OnPhase) -> None:
        self.on_phase = on_phase
        for node, link in self.links.items():
            link.channel.send(order=asdict(replace(self.order, node=node)))
        self.node.start(self.order)
        self._limit = time.monotonic() + self.order.patience + BEAT_S

    def follow(self) -> None:
        """Listen until the supervisor is done, or late and judged."""
        while True:
            left = self.supervisor.deadline - time.monotonic()
            # what is over and still in doubt waits for a node to be heard or lost
            left = min(left, BEAT_S) if left > 0 else BEAT_S / 10
            for news in self.node.news(ready([*self.node.handles, *self._channels()], left)):
                self._hear(0, news)
            for node, link in self.links.items():
                for message in link.channel.receive():
                    _check_interrupted(link, message)
                    if message.get("run") == self.order.run and "news" in message:
                        self._hear(node, message["news"])
            self._lose()
            self._meet()
            now = time.monotonic()
            if self.supervisor.done(now) and not self._in_doubt():
                return
            if self.supervisor.late(now):
                self._judge()
                return

    def _channels(self) -> list[Channel]:
        """To the nodes that can be heard."""
        return [link.channel for link in self.links.values() if not link.lost]

    def _hear(self, node: int, news: Mapping[str, Any]) -> None:
        now, rank = time.monotonic(), news.get("rank", -1)
        if "said" in news:
            self.phases[rank] = news["said"].get("phase", self.phases.get(rank))
            self.supervisor.hear(rank, news["said"], now)
            if rank == 0 and "phase" in news["said"]:
                self.on_phase(news["said"]["phase"], news["said"]["part"])
        elif "exit" in news:
            printed, killed = news["printed"], news["killed"]
            self.supervisor.ended(rank, news["exit"], printed, killed, now, news["at"])
        elif "torn" in news:
            outcome = Outcome(status="error", reason=news["torn"], facts={"lost_peer": True})
            self.supervisor.came_to(rank, outcome, now, news["at"])
        elif "failed" in news:
            self._fail(node, f"{news['failed']} (ranks meet at {self._place})")
        elif "started" in news:
            self.started.add(node)
            if len(self.started) == self.order.nodes:
                self._limit = now + MEET_S

    @property
    def _place(self) -> str:
        return f"{self.order.host}:{self.order.port}"

    def _fail(self, node: int, why: str) -> None:
        """The end of those of a node's ranks that have not come to one."""
        for rank in replace(self.order, node=node).ranks:
            phase = self.phases.get(rank) or "start"
            outcome = Outcome(status="error", reason=why, phase=phase)
            self.supervisor.came_to(rank, outcome, time.monotonic(), time.time_ns())

    def _lose(self) -> None:
        for node, link in self.links.items():
            if why := link.lost:
                self._fail(node, why)
                self.lost.add(node)

    def _meet(self) -> None:
        """Who has not begun by now never will: what each waits for does not come through."""
        if len(self.phases) == self.supervisor.trial.world_size or time.monotonic() < self._limit:
            return
        nodes = set(range(self.order.nodes))
        for node in nodes - self.started or nodes:
            said = f"the ranks did not meet at {self._place}; do the hosts reach each other"
            self._fail(node, f"{said} at every port?")

    def _in_doubt(self) -> bool:
        """Whether all that is known is that somebody lost a peer, and a node is silent: that peer
        may be there."""
        silent = {n for n, link in self.links.items() if link.channel.silent_s() > SILENT_S}
        # ask the supervisor, not the clock: a node may become lost at this very moment
        return bool(silent - self.lost and self.supervisor.outcome().facts.get("lost_peer"))

    def _judge(self) -> None:
        """The end of a trial that is late, by how the ranks look on all hosts."""
        for channel in self._channels():
            channel.send(look=self.order.run)
        seen = [self.node.look()]
        asked, end = set(self._channels()), time.monotonic() + LOOK_S + STACKS_S + END_S
        while asked and time.monotonic() < end:
            for channel in ready(asked, BEAT_S):
                for message in channel.receive():
                    if message.get("run") == self.order.run and "looked" in message:
                        seen.append(message["looked"])
                        asked.discard(channel)
            asked &= set(self._channels())
        running = set(self.supervisor.running)
        looks = {
            int(rank): ProcessSample(*look)
            for one in seen for rank, look in one["looks"].items() if int(rank) in running
        }  # fmt: skip
        stacks = {int(rank): lines for one in seen for rank, lines in one["stacks"].items()}
        hangs = self.supervisor.hangs(looks)
        self.supervisor.judge(
            looks, {r: s for r, s in stacks.items() if r in running} if hangs else {}
        )

    def end(self, outcome: Outcome | None) -> list[str]:
        """End the ranks on every host, and say what they left behind. outcome: what the others may
        tell their people; None where the trial was broken off."""
        words = outcome.model_dump(mode="json", include={"status", "reason"}) if outcome else None
        # to a lost node too: it may be about to be heard again
        for link in self.links.values():
            link.channel.send(end=self.order.run, outcome=words)
        orphans = self.node.end()
        orphans = [f"{name} on {self.here}" for name in orphans] if self.links else orphans
        asked, end = set(self._channels()), time.monotonic() + END_S
        while asked and time.monotonic() < end:
            for channel in ready(asked, BEAT_S):
                for message in channel.receive():
                    if message.get("run") == self.order.run and "ended" in message:
                        orphans += message["ended"]
                        asked.discard(channel)
            asked &= set(self._channels())
        return orphans


def _names(hosts: list[str], per: int) -> Callable[[int], str]:
    """What ranks are called: by their host too, where there are several."""
    if len(hosts) == 1:
        return "rank {}".format
    several = max(Counter(hosts).values()) > 1

    def name(rank: int) -> str:
        node = rank // per
        return f"rank {rank} (node {node})" if several else f"rank {rank} (host {hosts[node]})"

    return name


def _check_interrupted(link: NodeLink, message: Mapping[str, Any]) -> None:
    """Ctrl-C on one node is Ctrl-C on all."""
    if "interrupted" in message:
        raise KeyboardInterrupt(f"on {link.hello}")


def _free_port() -> int:
    """For one trial's store; the agent opens it a moment later."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


# ---- the other nodes ---------------------------------------------------------------------------


class Follower:
    """A node that starts its ranks when node 0 says so, until node 0 says that it is over."""

    def __init__(
        self, site: Site, hello: Hello, patience: float, tell: Tell, on_trial: OnTrial
    ) -> None:
        self._site, self._hello, self._patience = site, hello, patience
        self._tell, self._on_trial = tell, on_trial
        self._forked = LocalLauncher()
        self._node = HostRanks(self._forked._context)
        self._trial: Trial | None = None
        self._trials = 0

    def follow(self) -> None:
        """Raises UserError where node 0 refuses this node or ended with one, LauncherError where it
        does not answer, KeyboardInterrupt where it was interrupted."""
        channel = self._join()
        try:
            while (over := self._serve(channel)) is None:
                during = f" in trial {self._trials}" if self._node.handles else ""
                self._node.end()
                me, why = self._hello.node, channel.gone
                self._tell(f"node {me}: lost node 0 ({why}){during}; looking for it")
                channel.close()
                channel = self._join()
        except KeyboardInterrupt:
            channel.send(interrupted=True)
            raise
        finally:
            self._node.end()
            channel.close()
        if over["interrupted"]:
            raise KeyboardInterrupt
        if over["over"]:
            raise UserError(f"node 0 ended: {over['over']}")

    def _join(self) -> Channel:
        channel = join(self._site, self._hello, self._patience, self._tell)
        try:
            devices = self._forked.catalogue().devices
        except LauncherError as error:
            channel.send(unable=str(error))
            raise
        channel.send(ready={name: info.name for name, info in devices.items()})
        return channel

    def _serve(self, channel: Channel) -> dict[str, Any] | None:
        """Do what node 0 says. Returns its last word, or None where it is lost."""
        while True:
            for news in self._node.news(ready([channel, *self._node.handles], BEAT_S)):
                channel.send(run=self._run, news=news)
            for message in channel.receive():
                if "over" in message:
                    return message
                self._obey(channel, message)
            if channel.silent_s() > control_channel.LOST_S:
                channel.close(channel.gone or f"no word for {control_channel.LOST_S:.0f} s")
                return None

    def _obey(self, channel: Channel, message: dict[str, Any]) -> None:
        if "order" in message:
            self._node.end()
            order = HostJob(**{**message["order"], "address": channel.address})
            self._run, self._trial = order.run, Trial.model_validate(order.trial)
            self._trials += 1
            try:
                self._node.start(order)
            except LauncherError as error:
                channel.send(run=order.run, news={"failed": str(error)})
        elif "look" in message:
            channel.send(run=message["look"], looked=self._node.look())
        elif "end" in message:
            host = self._hello.host
            orphans = [f"{name} on {host}" for name in self._node.end()]
            channel.send(run=message["end"], ended=orphans)
            if self._trial and message["outcome"]:
                outcome = Outcome.model_validate(message["outcome"])
                self._on_trial(self._trials, self._trial, outcome)
