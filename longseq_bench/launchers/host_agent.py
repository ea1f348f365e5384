"""The ranks of one host: torch's elastic agent starts them, this module follows them.

Their state is reported as plain data with global ranks. So a RankSupervisor processes events of
this host and of another one alike:

{"started": true}                                               the ranks of this host run
{"rank": 1, "message": {...}}                                   a message of a rank
{"rank": 1, "exit": -9, "printed": "...", "killed": false, "at": 17...}    a rank exited
{"rank": 1, "lost_peer": "...", "at": 17...}                    a rank was ended because of a peer
{"failed": "..."}                                               the other ranks report no more
"""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from socket import socketpair
from typing import Any

import psutil

from longseq_bench.core.cluster_env import LOOPBACK
from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers import _child_entry, fork_server
from longseq_bench.launchers.exit_status import (
    find_nccl_files,
    kernel_kills,
    remove_nccl_files,
    signal_name,
)
from longseq_bench.launchers.fd_passing import send_fds
from longseq_bench.launchers.interrupts import defer_interrupts
from longseq_bench.launchers.local import PRELOAD
from longseq_bench.launchers.output_file import OutputFile
from longseq_bench.launchers.process_inspection import kill_orphans, read_stacks, sample_processes
from longseq_bench.launchers.rank_supervisor import GRACE_S

AGENT_PRELOAD = [*PRELOAD, "longseq_bench.worker.elastic_ranks"]


@dataclass(frozen=True)
class HostJob:
    """One host's part of a trial: the `per` ranks from node * per on, of nodes * per.

    run: a unique name of this attempt.
    host, port: of the store, which rank 0's agent keeps.
    patience: seconds that the agents wait for each other.
    address: this host's own address on the way to the store.
    """

    run: str
    trial: dict[str, Any]
    nodes: int
    per: int
    host: str
    port: int
    patience: float
    node: int = 0
    address: str = LOOPBACK

    @property
    def ranks(self) -> range:
        """Return the global ranks of this host."""
        return range(self.node * self.per, (self.node + 1) * self.per)

    @property
    def store(self) -> str:
        """Return the address of the store, where the ranks meet."""
        return f"{self.host}:{self.port}"


@dataclass
class _Rank:
    """A rank of this host."""

    pipe: Connection
    output: OutputFile = field(default_factory=OutputFile)
    pid: int = 0
    status: str | None = None
    ended: bool = False


class HostRanks:
    """This host's ranks of one trial at a time.

    Call `start`; wait for `handles` and read `events`; `inspect` ranks that are late; then `end`.
    """

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        context.set_forkserver_preload(AGENT_PRELOAD)
        self._job: HostJob | None = None

    def start(self, job: HostJob) -> None:
        """Start the agent, which starts the ranks. Raises LauncherError if it can't be started."""
        fork_server.ready()
        with defer_interrupts():
            self._start(job)

    def _start(self, job: HostJob) -> None:
        pipes = [self._context.Pipe(duplex=False) for _ in job.ranks]
        self._job, self._kills, self._shared = job, kernel_kills(), find_nccl_files()
        self._server: int | None = None
        self._ranks = {r: _Rank(pipe) for r, (pipe, _) in zip(job.ranks, pipes, strict=True)}
        self._events, agent_events = self._context.Pipe(duplex=False)
        self._agent_output = OutputFile()
        own_end, agent_end = socketpair()
        self._process = self._context.Process(
            target=_child_entry.enter_agent,
            args=(json.dumps(asdict(job)), agent_events, agent_end, self._agent_output),
        )
        self._open: dict[Any, int | None] = {one.pipe: r for r, one in self._ranks.items()}
        with own_end, ExitStack() as handed:
            for close in (agent_events.close, agent_end.close, *(end.close for _, end in pipes)):
                handed.callback(close)
            try:
                fork_server.start(self._process)
            except LauncherError:
                self._job = None
                self._close()
                raise
            agent_end.close()
            descriptors = [sender.fileno() for _, sender in pipes]
            descriptors += [rank.output.fileno() for rank in self._ranks.values()]
            # if the agent has ended already, its exit is reported
            with suppress(OSError):
                send_fds(own_end, descriptors)
        self._open |= {self._events: None, self._process.sentinel: None}

    @property
    def handles(self) -> list[Any]:
        """Return the handles to wait for."""
        return list(self._open) if self._job else []

    def events(self, ready: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Yield the events (see the module) of those handles that are ready."""
        for handle in [h for h in self.handles if h in ready]:
            rank = self._open[handle]
            if rank is not None:
                yield from self._receive(rank)
            elif handle is self._events:
                yield from self._receive_from_agent()
            else:
                del self._open[handle]
                # its last messages are still in the pipe
                while self._events in self._open:
                    yield from self._receive_from_agent()
                self._process.join()
                code = self._process.exitcode or 0
                how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
                last = self._agent_output.tail().strip().splitlines()[-1:]
                yield {"failed": ": ".join([f"torch's agent ended ({how})", *last])}

    def _receive(self, rank: int) -> Iterator[dict[str, Any]]:
        one = self._ranks[rank]
        if message := fork_server.receive(one.pipe):
            if "outcome" in message:
                one.status = message["outcome"]["status"]
            yield {"rank": rank, "message": message}
        else:
            self._open.pop(one.pipe, None)

    def _receive_from_agent(self) -> Iterator[dict[str, Any]]:
        message = fork_server.receive(self._events)
        if message is None:
            self._open.pop(self._events, None)
        elif "server" in message:
            self._server = message["server"]
        elif "started" in message:
            for rank, pid in zip(self._ranks.values(), message["started"], strict=True):
                rank.pid = pid
            yield {"started": True}
        elif "exit" in message:
            assert self._job
            yield from self._ended(self._job.ranks[message["local_rank"]], message)
        else:
            yield message

    def _ended(self, rank: int, how: dict[str, Any]) -> Iterator[dict[str, Any]]:
        one = self._ranks[rank]
        # its earlier messages come first
        while one.pipe in self._open and one.pipe.poll():
            yield from self._receive(rank)
        one.ended = True
        if one.status is not None:
            return
        others = [r for r in self._ranks.values() if r is not one and r.ended and not r.status]
        if how["exit"] == -signal.SIGTERM and others:
            reason = "ended because another rank here had died"
            yield {"rank": rank, "lost_peer": reason, "at": how["at"]}
        else:
            yield {
                "rank": rank, "exit": how["exit"], "printed": one.output.tail(),
                "killed": kernel_kills() > self._kills, "at": how["at"],
            }  # fmt: skip

    def inspect(self) -> dict[str, Any]:
        """Return process samples and stacks of the ranks that have no outcome yet."""
        ranks = self._ranks if self._job else {}
        pids = {rank: one.pid for rank, one in ranks.items() if one.pid and not one.status}
        samples = sample_processes(pids, True)
        found = {rank: pids[rank] for rank in samples}
        return {
            "samples": {rank: [one.stopped, one.busy] for rank, one in samples.items()},
            "stacks": read_stacks(found, {rank: ranks[rank].output for rank in found}),
        }

    def end(self) -> list[str]:
        """End the ranks, killing those that don't end by themselves.

        Returns the names of processes that they left. Does nothing if no trial runs.
        """
        with defer_interrupts():
            return self._end() if self._job else []

    def _end(self) -> list[str]:
        self._job = None
        for one in self._ranks.values():
            one.pipe.close()
        passed = all(one.status == "ok" for one in self._ranks.values())
        fork_server.end(self._process, GRACE_S if passed else 0.0)
        # wait for ranks that were killed with their agent, so that none counts as left over
        processes = []
        for pid in [one.pid for one in self._ranks.values() if one.pid]:
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        psutil.wait_procs(processes, timeout=GRACE_S)
        orphans = kill_orphans(self._server)
        self._close()
        remove_nccl_files(self._shared)
        return orphans

    def _close(self) -> None:
        self._events.close()
        self._agent_output.close()
        for one in self._ranks.values():
            one.pipe.close()
            one.output.close()
