"""One host's ranks, of one trial after the other: torch's agent starts them, this follows them.

What becomes of them is told in messages of plain data, by their rank among all, so that it makes no
difference to a RankSupervisor whether they were read here or came from another host:

{"started": true}                                               the ranks of this host are there
{"rank": 1, "said": {...}}                                      in a rank's own words
{"rank": 1, "exit": -9, "printed": "...", "killed": false, "at": 17...}    a rank is gone
{"rank": 1, "torn": "...", "at": 17...}                         a rank that was ended for a peer
{"failed": "..."}                                               no more will be heard from the rest
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from socket import socketpair
from typing import Any

import psutil

from longseq_bench.core.cluster_env import LOOPBACK
from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers import _agent_entry, fork_server
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
from longseq_bench.launchers.process_inspection import kill_orphans, look, stacks
from longseq_bench.launchers.rank_supervisor import GRACE_S

AGENT_PRELOAD = [*PRELOAD, "longseq_bench.worker.elastic_ranks"]


@dataclass(frozen=True)
class HostJob:
    """What one host has to do for a trial: ranks node * per onwards, `per` of them, of nodes * per.

    host, port: where rank 0's agent keeps the store. address: this host's own on the way there.
    patience: how long the agents wait for each other, s.
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
        return range(self.node * self.per, (self.node + 1) * self.per)


class _Rank:
    """One rank of this host."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.output = pipe, OutputFile()
        self.pid = 0
        self.status: str | None = None
        self.ended = False

    def hear(self) -> dict[str, Any] | None:
        """Its next message; None where there will be none any more."""
        try:
            message: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None
        if "outcome" in message:
            self.status = message["outcome"]["status"]
        return message

    def close(self) -> None:
        self.pipe.close()
        self.output.close()


class HostRanks:
    """This host's ranks. One trial at a time: start, handles and news, look, end."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        context.set_forkserver_preload(AGENT_PRELOAD)
        self._order: HostJob | None = None

    def start(self, order: HostJob) -> None:
        """Start the agent, which starts the ranks. Raises LauncherError where it can't be."""
        fork_server.ready()
        with defer_interrupts():
            self._start(order)

    def _start(self, order: HostJob) -> None:
        pipes = [self._context.Pipe(duplex=False) for _ in order.ranks]
        self._order, self._kills, self._shared = order, kernel_kills(), find_nccl_files()
        self._server: int | None = None
        self._ranks = {r: _Rank(pipe) for r, (pipe, _) in zip(order.ranks, pipes, strict=True)}
        self._words, theirs = self._context.Pipe(duplex=False)
        self._own = _Rank(self._words)
        senders = [sender for _, sender in pipes]
        ours, takes = socketpair()
        self._process = self._context.Process(
            target=_agent_entry.enter,
            args=(json.dumps(asdict(order)), theirs, takes, self._own.output),
        )
        self._open: dict[Any, int | None] = {one.pipe: r for r, one in self._ranks.items()}
        try:
            fork_server.start(self._process)
            takes.close()
            speak = [sender.fileno() for sender in senders]
            outputs = [rank.output.fileno() for rank in self._ranks.values()]
            # of an agent that has ended, its end tells
            with suppress(OSError):
                send_fds(ours, speak + outputs)
        except LauncherError:
            self._order = None
            self._close()
            raise
        finally:
            for sender in (*senders, theirs):
                sender.close()
            ours.close()
            takes.close()
        self._open |= {self._words: None, self._process.sentinel: None}

    @property
    def handles(self) -> list[Any]:
        """What to wait for until there is news."""
        return list(self._open) if self._order else []

    def news(self, ready: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """What has become of the ranks, of those handles that are ready."""
        for handle in [h for h in self.handles if h in ready]:
            rank = self._open[handle]
            if rank is not None:
                yield from self._hear(rank)
            elif handle is self._words:
                yield from self._hear_agent()
            else:
                del self._open[handle]
                # what it said last is in the pipe still
                while self._words in self._open:
                    yield from self._hear_agent()
                yield {"failed": self._death()}

    def _hear(self, rank: int) -> Iterator[dict[str, Any]]:
        if message := self._ranks[rank].hear():
            yield {"rank": rank, "said": message}
        else:
            self._open.pop(self._ranks[rank].pipe, None)

    def _hear_agent(self) -> Iterator[dict[str, Any]]:
        message = self._own.hear()
        if message is None:
            self._open.pop(self._words, None)
        elif "server" in message:
            self._server = message["server"]
        elif "started" in message:
            for rank, pid in zip(self._ranks.values(), message["started"], strict=True):
                rank.pid = pid
            yield {"started": True}
        elif "exit" in message:
            assert self._order
            yield from self._ended(self._order.ranks[message["local_rank"]], message)
        else:
            yield message

    def _ended(self, rank: int, how: dict[str, Any]) -> Iterator[dict[str, Any]]:
        one = self._ranks[rank]
        # what it said before comes first
        while one.pipe in self._open and one.pipe.poll():
            yield from self._hear(rank)
        one.ended = True
        if one.status is not None:
            return
        others = [r for r in self._ranks.values() if r is not one and r.ended and not r.status]
        if how["exit"] == -signal.SIGTERM and others:
            yield {"rank": rank, "torn": "ended, since another rank here had died", "at": how["at"]}
        else:
            yield {
                "rank": rank, "exit": how["exit"], "printed": one.output.tail(),
                "killed": kernel_kills() > self._kills, "at": how["at"],
            }  # fmt: skip

    def _death(self) -> str:
        self._process.join()
        code, last = (
            self._process.exitcode or 0,
            self._own.output.tail().strip().splitlines()[-1:],
        )
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"torch's agent {how}" + (f": {last[0]}" if last else "")

    def look(self) -> dict[str, Any]:
        """How the ranks that have said no outcome look from outside, and where each one is."""
        ranks = self._ranks if self._order else {}
        pids = {rank: one.pid for rank, one in ranks.items() if one.pid and not one.status}
        looks = look(pids, True)
        return {
            "looks": {rank: [seen.stopped, seen.busy] for rank, seen in looks.items()},
            "stacks": stacks({r: pids[r] for r in looks}, {r: ranks[r].output for r in looks}),
        }

    def end(self) -> list[str]:
        """Dismiss the ranks where all are done, kill what is left, and say what they left behind.
        Does nothing where no trial is under way."""
        with defer_interrupts():
            return self._end() if self._order else []

    def _end(self) -> list[str]:
        self._order = None
        for one in self._ranks.values():
            one.pipe.close()
        if all(one.status == "ok" for one in self._ranks.values()):
            self._process.join(GRACE_S)
        if self._process.is_alive() and self._process.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        self._wait_for_ranks()
        orphans = kill_orphans(self._server)
        self._close()
        remove_nccl_files(self._shared)
        return orphans

    def _close(self) -> None:
        for one in (*self._ranks.values(), self._own):
            one.close()

    def _wait_for_ranks(self) -> None:
        """They were killed with their agent; until they are gone they look like what was left."""
        going = []
        for pid in [one.pid for one in self._ranks.values() if one.pid]:
            with suppress(psutil.NoSuchProcess):
                going.append(psutil.Process(pid))
        psutil.wait_procs(going, timeout=GRACE_S)
