"""The other nodes of a launch: each runs ranks on request of node 0 (messages: elastic.py)."""

import time
from collections.abc import Callable
from typing import Any

from longseq_bench.core.cluster_env import NodeInfo, split
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.launchers import control_channel
from longseq_bench.launchers.control_channel import (
    HEARTBEAT_S,
    Channel,
    connect_to_node_0,
    wait_ready,
)
from longseq_bench.launchers.control_messages import (
    EndOrder,
    InspectOrder,
    Job,
    NodeIdentity,
    Shutdown,
    StartOrder,
)
from longseq_bench.launchers.host_agent import HostJob, HostRanks
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.launchers.own_command import OwnCommand

OnTrial = Callable[[int, Trial, Outcome], None]
"""Called after each trial with its number, the trial and its outcome."""


class Follower:
    """The loop of a node other than node 0, until node 0 ends the launch."""

    def __init__(
        self,
        cluster: NodeInfo,
        identity: NodeIdentity,
        key: bytes,
        command: OwnCommand,
        timeout_s: float,
        log: Callable[[str], None],
        on_trial: OnTrial,
    ) -> None:
        self._cluster, self._identity, self._key = cluster, identity, key
        self._command, self._timeout_s = command, timeout_s
        self._log, self._on_trial = log, on_trial
        self._local = LocalLauncher()
        self._ranks = HostRanks(self._local.context)
        self._trial: Trial | None = None
        self._trial_count = 0

    def follow(self) -> None:
        """Process requests of node 0 until the launch is over.

        Raises:
            UserError: node 0 refuses this node, or ended with a user's mistake.
            LauncherError: node 0 does not answer.
            KeyboardInterrupt: this node or node 0 was interrupted.
        """
        channel = self._connect()
        try:
            while (shutdown := self._serve(channel)) is None:
                during = f" in trial {self._trial_count}" if self._ranks.handles else ""
                self._ranks.end()
                name, reason = f"node {self._identity.node}", channel.disconnect_reason
                self._log(f"{name}: lost node 0 ({reason}){during}; connecting again")
                channel.close()
                time.sleep(control_channel.RETRY_S)
                channel = self._connect()
        except KeyboardInterrupt:
            channel.send(interrupted=True)
            raise
        finally:
            self._ranks.end()
            channel.close()
        if shutdown.interrupted:
            raise KeyboardInterrupt
        if shutdown.shutdown:
            raise UserError(f"node 0 ended: {shutdown.shutdown}")

    def _connect(self) -> Channel:
        channel = connect_to_node_0(
            self._cluster, self._identity, self._key, self._timeout_s, self._log
        )
        try:
            devices = self._local.catalogue().devices
            self._command.read(self._local.catalogue())
        except LauncherError as error:
            channel.send(unavailable=str(error))
            raise
        except KeyboardInterrupt:
            channel.send(interrupted=True)
            channel.close()
            raise
        channel.send(ready={name: info.name for name, info in devices.items()})
        return channel

    def _serve(self, channel: Channel) -> Shutdown | None:
        """Process node 0's messages. Returns the shutdown message, or None if node 0 is lost."""
        while True:
            ready = wait_ready([channel, *self._ranks.handles], HEARTBEAT_S)
            for event in self._ranks.events(ready):
                channel.send(run_id=self._run_id, event=event)
            for message in channel.receive():
                if isinstance(message, Shutdown):
                    return message
                self._handle(channel, message)
            if channel.silent_s() > control_channel.LOST_S:
                silence = f"no message for {control_channel.LOST_S:.0f} s"
                channel.close(channel.disconnect_reason or silence)
                return None

    def _handle(self, channel: Channel, message: Any) -> None:
        match message:
            case StartOrder(start=job):
                self._ranks.end()
                self._start(channel, job)
            case InspectOrder(inspect=run_id):
                channel.send(run_id=run_id, inspection=self._ranks.inspect())
            case EndOrder(end=run_id, outcome=summary):
                host = self._identity.host
                orphans = [f"{name} on {host}" for name in self._ranks.end()]
                channel.send(run_id=run_id, orphans=orphans)
                if self._trial and summary:
                    outcome = Outcome(status=summary.status, reason=summary.reason)
                    self._on_trial(self._trial_count, self._trial, outcome)
                self._trial = None

    def _start(self, channel: Channel, order: Job) -> None:
        """Start the ranks of a trial, if this node's own command would run it."""
        if refusal := self._find_refusal(order, channel.peer_address):
            self._log(f"node {self._identity.node}: refused an order of node 0: {refusal}")
            reason = f"{self._identity} refused the trial: {refusal}"
            channel.send(run_id=order.run_id, event={"failed": reason})
            return
        fields = dict(order) | {"trial": order.trial.model_dump(mode="json")}
        job = HostJob(**fields | {"address": channel.address})
        self._run_id, self._trial = job.run_id, order.trial
        self._trial_count += 1
        try:
            self._ranks.start(job)
        except LauncherError as error:
            channel.send(run_id=job.run_id, event={"failed": str(error)})

    def _find_refusal(self, order: Job, node_0: str) -> str:
        """Return how an order differs from this node's command, or an empty string."""
        try:
            expected = split(order.trial.world_size, self._cluster)
        except ValueError as error:
            return str(error)
        if (order.nodes, order.ranks_per_node) != expected or order.nodes == 1:
            return (
                f"{order.ranks_per_node} rank(s) on each of {order.nodes} node(s) are not a part "
                f"of this launch for {order.trial.world_size} ranks"
            )
        if order.node != self._cluster.node:
            return f"it is for node {order.node}"
        if order.host != node_0:
            return f"its ranks would meet at {order.host}, and node 0 is {node_0}"
        return self._command.refusal(order.trial)
