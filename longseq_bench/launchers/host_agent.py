"""The ranks of one host: torch's elastic agent starts them, this module follows them.

Their events are JSON data with global ranks, so that a RankSupervisor processes events of this
host and of other hosts alike:

{"started": true}                                               the ranks of this host run
{"rank": 1, "message": {...}}                                   a message of a rank
{"rank": 1, "exit": -9, "printed": "...", "killed": false, "at": 17...}    a rank exited
{"rank": 1, "lost_peer": "...", "at": 17...}                    a rank was ended because of a peer
{"failed": "...", "environment": true}     ranks without an outcome failed; if by another process
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
from longseq_bench.core.scratch import scratch_folder
from longseq_bench.launchers import _child_entry, fork_server
from longseq_bench.launchers.exit_status import (
    find_nccl_files,
    kernel_kills,
    remove_nccl_files,
    signal_name,
)
from longseq_bench.launchers.fd_passing import send_fds
from longseq_bench.launchers.interrupts import defer_interrupts
from longseq_bench.launchers.local import LOADED, PRELOAD, SERVER_ENDED
from longseq_bench.launchers.output_file import OutputFile
from longseq_bench.launchers.process_inspection import kill_orphans, read_stacks, sample_processes
from longseq_bench.launchers.rank_supervisor import GRACE_S

AGENT_PRELOAD = [*PRELOAD, "longseq_bench.worker.elastic_ranks"]


@dataclass(frozen=True)
class HostJob:
    """One host's part of a trial: `ranks_per_node` ranks, from node * ranks_per_node on.

    run_id: a unique name of this attempt.
    host, port: address of the store, which the agent of node 0 serves.
    timeout_s: time that the agents wait for each other.
    address: this host's own address on the control channel.
    """

    run_id: str
    trial: dict[str, Any]
    nodes: int
    ranks_per_node: int
    host: str
    port: int
    timeout_s: float
    node: int = 0
    address: str = LOOPBACK

    @property
    def ranks(self) -> range:
        """Return the global ranks of this host."""
        first = self.node * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

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
        context.set_forkserver_preload([*AGENT_PRELOAD, LOADED])
        self._job: HostJob | None = None

    def start(self, job: HostJob) -> None:
        """Start the agent, which starts the ranks. Raises LauncherError if it can't be started."""
        fork_server.ready()
        with defer_interrupts():
            self._start(job)

    def _start(self, job: HostJob) -> None:
        temporary = str(scratch_folder())
        pipes = [self._context.Pipe(duplex=False) for _ in job.ranks]
        # first what fails on a full disk: without a job there is nothing to end
        self._ranks = {r: _Rank(pipe) for r, (pipe, _) in zip(job.ranks, pipes, strict=True)}
        self._agent_output = OutputFile()
        self._job, self._kills_before, self._nccl_files = job, kernel_kills(), find_nccl_files()
        self._server: int | None = None
        self._events, agent_events = self._context.Pipe(duplex=False)
        own_end, agent_end = socketpair()
        self._process = self._context.Process(
            target=_child_entry.enter_agent,
            args=(json.dumps(asdict(job)), agent_events, agent_end, self._agent_output, temporary),
        )
        # which rank a handle belongs to; None: the agent
        self._open: dict[Any, int | None] = {state.pipe: r for r, state in self._ranks.items()}
        with own_end, ExitStack() as child_ends:
            for close in (agent_events.close, agent_end.close, *(end.close for _, end in pipes)):
                child_ends.callback(close)
            try:
                self._started_by = fork_server.start(self._process)
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
        """Return the handles to wait for; none without a trial."""
        return list(self._open) if self._job else []

    def events(self, ready: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Yield the events (see the top of this file) of the handles that are ready."""
        for handle in [h for h in self.handles if h in ready]:
            rank = self._open[handle]
            if rank is not None:
                yield from self._receive(rank)
            elif handle is self._events:
                yield from self._receive_from_agent()
            else:
                del self._open[handle]
                # read the last messages, which are still in the pipe
                while self._events in self._open:
                    yield from self._receive_from_agent()
                self._process.join()
                code = self._process.exitcode or 0
                exit_text = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
                last = self._agent_output.tail().strip().splitlines()[-1:]
                failed = ": ".join([f"torch's agent ended ({exit_text})", *last])
                lost = fork_server.lost_with_server(self._process, self._started_by)
                is_killed = lost or code < 0
                yield {"failed": SERVER_ENDED if lost else failed, "environment": is_killed}

    def _receive(self, rank: int) -> Iterator[dict[str, Any]]:
        state = self._ranks[rank]
        if message := fork_server.receive(state.pipe):
            if "outcome" in message:
                state.status = message["outcome"]["status"]
            yield {"rank": rank, "message": message}
        else:
            self._open.pop(state.pipe, None)

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
            yield from self._process_exit(self._job.ranks[message["local_rank"]], message)
        else:
            yield message

    def _process_exit(self, rank: int, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the last messages of a rank, then its exit; after a peer's exit, a lost peer."""
        state = self._ranks[rank]
        while state.pipe in self._open and state.pipe.poll():
            yield from self._receive(rank)
        state.ended = True
        if state.status is not None:
            return
        peer_died = any(r.ended and not r.status for r in self._ranks.values() if r is not state)
        if event["exit"] == -signal.SIGTERM and peer_died:
            reason = "ended because another rank here had died"
            yield {"rank": rank, "lost_peer": reason, "at": event["at"]}
        else:
            yield {
                "rank": rank, "exit": event["exit"], "printed": state.output.tail(),
                "killed": kernel_kills() > self._kills_before, "at": event["at"],
            }  # fmt: skip

    def inspect(self) -> dict[str, Any]:
        """Return process samples and stacks of the ranks that have no outcome yet."""
        ranks = self._ranks if self._job else {}
        pids = {rank: r.pid for rank, r in ranks.items() if r.pid and not r.status}
        device = self._job.trial["device"] if self._job else "cpu"
        samples = sample_processes(pids, True, device)
        pids = {rank: pids[rank] for rank in samples}
        return {
            "samples": {rank: [sample.stopped, sample.busy] for rank, sample in samples.items()},
            "stacks": read_stacks(pids, {rank: ranks[rank].output for rank in pids}),
        }

    def end(self) -> list[str]:
        """End the ranks; kill those that do not end. Without a trial, do nothing.

        Returns the names of processes that the ranks left.
        """
        with defer_interrupts():
            return self._end() if self._job else []

    def _end(self) -> list[str]:
        self._job = None
        for rank in self._ranks.values():
            rank.pipe.close()
        passed = all(rank.status == "ok" for rank in self._ranks.values())
        fork_server.end(self._process, GRACE_S if passed else 0.0)
        # wait for ranks that were killed with their agent, so that they do not count as left over
        processes = []
        for pid in [rank.pid for rank in self._ranks.values() if rank.pid]:
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        psutil.wait_procs(processes, timeout=GRACE_S)
        orphans = kill_orphans(self._server)
        self._close()
        remove_nccl_files(self._nccl_files)
        return orphans

    def _close(self) -> None:
        self._events.close()
        self._agent_output.close()
        for rank in self._ranks.values():
            rank.pipe.close()
            rank.output.close()
