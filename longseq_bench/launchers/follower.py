"""Every node of a launch but node 0: it starts ranks when node 0 says so."""

from collections.abc import Callable
from typing import Any

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.launchers import control_channel
from longseq_bench.launchers.control_channel import (
    BEAT_S,
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
    """The loop of a node that follows node 0, until node 0 ends the launch."""

    def __init__(
        self,
        site: NodeInfo,
        hello: NodeIdentity,
        patience: float,
        log: Callable[[str], None],
        on_trial: OnTrial,
    ) -> None:
        self._site, self._hello, self._patience = site, hello, patience
        self._log, self._on_trial = log, on_trial
        self._local = LocalLauncher()
        self._ranks = HostRanks(self._local._context)
        self._trial: Trial | None = None
        self._trials = 0

    def follow(self) -> None:
        """Obey node 0 until the launch is over.

        Raises:
            UserError: node 0 refuses this node, or ended with a user's mistake.
            LauncherError: node 0 does not answer.
            KeyboardInterrupt: this node or node 0 was interrupted.
        """
        channel = self._join()
        try:
            while (over := self._serve(channel)) is None:
                during = f" in trial {self._trials}" if self._ranks.handles else ""
                self._ranks.end()
                me, why = self._hello.node, channel.gone
                self._log(f"node {me}: lost node 0 ({why}){during}; connecting again")
                channel.close()
                channel = self._join()
        except KeyboardInterrupt:
            channel.send(interrupted=True)
            raise
        finally:
            self._ranks.end()
            channel.close()
        if over["interrupted"]:
            raise KeyboardInterrupt
        if over["over"]:
            raise UserError(f"node 0 ended: {over['over']}")

    def _join(self) -> Channel:
        channel = connect_to_node_0(self._site, self._hello, self._patience, self._log)
        try:
            devices = self._local.catalogue().devices
        except LauncherError as error:
            channel.send(unable=str(error))
            raise
        channel.send(ready={name: info.name for name, info in devices.items()})
        return channel

    def _serve(self, channel: Channel) -> dict[str, Any] | None:
        """Process node 0's messages. Returns its last one, or None if node 0 is lost."""
        while True:
            for event in self._ranks.events(wait_ready([channel, *self._ranks.handles], BEAT_S)):
                channel.send(run=self._run, news=event)
            for message in channel.receive():
                if "over" in message:
                    return message
                self._obey(channel, message)
            if channel.silent_s() > control_channel.LOST_S:
                channel.close(channel.gone or f"no message for {control_channel.LOST_S:.0f} s")
                return None

    def _obey(self, channel: Channel, message: dict[str, Any]) -> None:
        if "order" in message:
            self._ranks.end()
            job = HostJob(**{**message["order"], "address": channel.address})
            self._run, self._trial = job.run, Trial.model_validate(job.trial)
            self._trials += 1
            try:
                self._ranks.start(job)
            except LauncherError as error:
                channel.send(run=job.run, news={"failed": str(error)})
        elif "look" in message:
            channel.send(run=message["look"], looked=self._ranks.inspect())
        elif "end" in message:
            host = self._hello.host
            orphans = [f"{name} on {host}" for name in self._ranks.end()]
            channel.send(run=message["end"], ended=orphans)
            if self._trial and message["outcome"]:
                outcome = Outcome.model_validate(message["outcome"])
                self._on_trial(self._trials, self._trial, outcome)
