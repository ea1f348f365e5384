"""The other nodes of a launch: each runs ranks on request of node 0 (messages: elastic.py)."""

from collections.abc import Callable
from typing import Any

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.launchers import control_channel
from longseq_bench.launchers.control_channel import (
    HEARTBEAT_S,
    Channel,
    NodeIdentity,
    connect_to_node_0,
    wait_ready,
)
from longseq_bench.launchers.host_agent import HostJob, HostRanks
from longseq_bench.launchers.local import LocalLauncher

OnTrial = Callable[[int, Trial, Outcome], None]
"""Called after each trial with its number, the trial and its outcome."""


class Follower:
    """The loop of a node other than node 0, until node 0 ends the launch."""

    def __init__(
        self,
        cluster: NodeInfo,
        identity: NodeIdentity,
        timeout_s: float,
        log: Callable[[str], None],
        on_trial: OnTrial,
    ) -> None:
        self._cluster, self._identity, self._timeout_s = cluster, identity, timeout_s
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
                channel = self._connect()
        except KeyboardInterrupt:
            channel.send(interrupted=True)
            raise
        finally:
            self._ranks.end()
            channel.close()
        if shutdown["interrupted"]:
            raise KeyboardInterrupt
        if shutdown["shutdown"]:
            raise UserError(f"node 0 ended: {shutdown['shutdown']}")

    def _connect(self) -> Channel:
        channel = connect_to_node_0(self._cluster, self._identity, self._timeout_s, self._log)
        try:
            devices = self._local.catalogue().devices
        except LauncherError as error:
            channel.send(unavailable=str(error))
            raise
        channel.send(ready={name: info.name for name, info in devices.items()})
        return channel

    def _serve(self, channel: Channel) -> dict[str, Any] | None:
        """Process node 0's messages. Returns the shutdown message, or None if node 0 is lost."""
        while True:
            ready = wait_ready([channel, *self._ranks.handles], HEARTBEAT_S)
            for event in self._ranks.events(ready):
                channel.send(run_id=self._run_id, event=event)
            for message in channel.receive():
                if "shutdown" in message:
                    return message
                self._handle(channel, message)
            if channel.silent_s() > control_channel.LOST_S:
                silence = f"no message for {control_channel.LOST_S:.0f} s"
                channel.close(channel.disconnect_reason or silence)
                return None

    def _handle(self, channel: Channel, message: dict[str, Any]) -> None:
        if "start" in message:
            self._ranks.end()
            job = HostJob(**{**message["start"], "address": channel.address})
            self._run_id, self._trial = job.run_id, Trial.model_validate(job.trial)
            self._trial_count += 1
            try:
                self._ranks.start(job)
            except LauncherError as error:
                channel.send(run_id=job.run_id, event={"failed": str(error)})
        elif "inspect" in message:
            channel.send(run_id=message["inspect"], inspection=self._ranks.inspect())
        elif "end" in message:
            host = self._identity.host
            orphans = [f"{name} on {host}" for name in self._ranks.end()]
            channel.send(run_id=message["end"], orphans=orphans)
            if self._trial and message["outcome"]:
                outcome = Outcome.model_validate(message["outcome"])
                self._on_trial(self._trial_count, self._trial, outcome)
