"""Run functions on several ranks, for tests, in groups of processes that wait for jobs.

    def share(group: Group, factor: int) -> float:          # at the top of a test module
        return float(group.all_sum(torch.tensor([group.rank * factor])))

    def test_a_sum(ranks: Ranks) -> None:                   # `ranks` is a fixture of the session
        assert ranks(3, share, 2) == [6, 6, 6]

`ranks(world, function, *arguments)` calls function(group, *arguments) on each rank and returns the
results by rank. Function, arguments and results are pickled. If a rank raises, RanksFailed has the
texts of all exceptions.

A world starts with its first job and stays for the session; a job then takes milliseconds. The
first world takes three seconds, mostly to import torch; later ones are forked from the same server.
Ranks are gloo processes with one thread; they connect through a file. If ranks end differently,
their collectives may be out of step: the world is killed, and the next job gets a new one.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GRACE_S = 3.0
"""Time for the other ranks to report after one has failed."""

LIMIT_S = 120.0
"""Time limit of a job, so that nothing hangs."""


class RanksFailed(AssertionError):
    """A rank raised. texts: of each rank's exception; None if it returned."""

    def __init__(self, texts: Sequence[str | None]) -> None:
        self.texts = list(texts)
        raised = [f"rank {r}: {t}" for r, t in enumerate(texts) if t is not None]
        super().__init__("\n".join(raised))


class Server:
    """A process that has imported what jobs need, and forks the ranks of every world."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair()
        code = f"from tests.ranks import serve; serve({other.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, pass_fds=[other.fileno()],
            start_new_session=True,
        )  # fmt: skip
        other.close()

    def fork(self, store: str, ends: Sequence[Connection]) -> None:
        """Fork a rank for each end of a pipe; each sends its process ID first."""
        socket.send_fds(self._control, [store.encode()], [end.fileno() for end in ends])

    def close(self) -> None:
        """Kill the server and all ranks."""
        self._control.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class World:
    """The processes of one size of world."""

    def __init__(self, server: Server, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="longseq-ranks-")
        ends = [Pipe() for _ in range(size)]
        self._pipes = [own_end for own_end, _ in ends]
        server.fork(os.path.join(self._folder.name, "store"), [child for _, child in ends])
        for _, child_end in ends:
            child_end.close()
        self._pids = [pipe.recv() for pipe in self._pipes]

    def run(self, job: tuple[Any, ...]) -> tuple[list[Any], list[str | None]]:
        """Return the result and the text of the exception of each rank."""
        for pipe in self._pipes:
            pipe.send(job)
        results: list[Any] = [None] * len(self._pipes)
        texts: list[str | None] = ["it did not answer"] * len(self._pipes)
        remaining, end = list(self._pipes), time.monotonic() + LIMIT_S
        while remaining and (ready := wait(remaining, max(0.0, end - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                remaining.remove(pipe)
                try:
                    results[rank], texts[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    texts[rank] = "it died"
                if texts[rank] is not None:
                    end = min(end, time.monotonic() + GRACE_S)
        return results, texts

    def close(self) -> None:
        """Kill all processes."""
        for pipe in self._pipes:
            pipe.close()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._folder.cleanup()


class Ranks:
    """Worlds by size, each started with its first job."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        self._server: Server | None = None

    def __call__(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of function(group, *arguments) on `world` ranks; raise RanksFailed."""
        self._server = self._server or Server()
        ranks = self._worlds.get(world) or World(self._server, world)
        self._worlds[world] = ranks
        results, texts = ranks.run((function, arguments))
        # if all ranks raised the same exception at the same place, no rank waits for another
        if len(set(texts)) > 1:
            self._worlds.pop(world).close()
        if any(text is not None for text in texts):
            raise RanksFailed(texts)
        return results

    def close(self) -> None:
        """End every world."""
        while self._worlds:
            self._worlds.popitem()[1].close()
        if self._server:
            self._server.close()
            self._server = None


# ---- in the processes --------------------------------------------------------------------------


def serve(control: int) -> None:
    """Import what jobs need, once; then fork the ranks of each world that is asked for."""
    import torch._dynamo  # noqa: F401  DistributedDataParallel imports it

    import tests.attention.test_ranks  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks that end leave no zombies
    requests = socket.socket(fileno=control)
    while store := (request := socket.recv_fds(requests, 4096, 64))[0]:
        ends = request[1]
        for rank, end in enumerate(ends):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                for other in ends:
                    if other != end:
                        os.close(other)
                _serve(rank, len(ends), Connection(end), store.decode())
                os._exit(0)
        for end in ends:
            os.close(end)


def _serve(rank: int, size: int, pipe: Connection, store: str) -> None:
    """Send the process ID, connect to the other ranks, then do jobs until the pipe closes."""
    pipe.send(os.getpid())
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from longseq_bench.distributed.group import Group

    torch.set_num_threads(1)
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )  # fmt: skip
    make_group, groups = dist.new_group, dict[tuple[int, ...], Any]()

    def new_group(ranks: Sequence[int], **options: Any) -> Any:
        """Return the same group for the same ranks: connecting takes a tenth of a second."""
        if tuple(ranks) not in groups:
            groups[tuple(ranks)] = make_group(ranks, **options)
        return groups[tuple(ranks)]

    dist.new_group = new_group
    while True:
        try:
            function, arguments = pipe.recv()
            answer = (function(Group.world("cpu"), *arguments), None)
        except EOFError:  # the parent has closed the pipe
            return
        except Exception:
            answer = (None, traceback.format_exc())
        pipe.send(answer)
