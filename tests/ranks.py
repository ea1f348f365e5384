"""Run functions on several ranks, for tests, in groups of processes that wait for jobs.

    def share(group: Group, factor: int) -> float:          # at the top of a test module
        return float(group.all_sum(torch.tensor([group.rank * factor])))

    def test_a_sum(ranks: Ranks) -> None:                   # `ranks` is a fixture of the session
        assert ranks(3, share, 2) == [6, 6, 6]

`ranks(world, function, *arguments)` calls function(group, *arguments) on each rank and returns the
results by rank. Function, arguments and results are pickled. If a rank raises, RanksFailed has the
texts of all exceptions; `failures` returns these texts.

A world starts with its first job and stays for the session; a job then takes milliseconds. The
first world takes three seconds, mostly to import torch; later ones are forked from the same server.
Ranks are gloo processes with one thread; they connect through a file. If ranks end differently,
their collectives may be out of step: the world is killed, and the next job gets a new one.
"""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

IMPORTED_ONCE = ["torch._dynamo", "tests.attention.test_ranks"]
"""Modules of most jobs: imported before the ranks are forked, not by every rank."""
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


class World:
    """The processes of one size of world."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="longseq-ranks-")
        store = os.path.join(self._folder.name, "store")
        context = get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            own_end, child_end = Pipe()
            process = context.Process(
                target=serve, args=(rank, size, child_end, store), daemon=True
            )
            process.start()
            child_end.close()
            self._pipes.append(own_end)
            self._processes.append(process)

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
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


class Ranks:
    """Worlds by size, each started with its first job."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of function(group, *arguments) on `world` ranks; raise RanksFailed."""
        results, texts = self._run(world, function, arguments)
        if any(text is not None for text in texts):
            raise RanksFailed(texts)
        return results

    def failures(
        self, world: int, function: Callable[..., Any], *arguments: Any
    ) -> list[str | None]:
        """Return the traceback of each rank's exception; None if it returned."""
        return self._run(world, function, arguments)[1]

    def close(self) -> None:
        """End every world."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    def _run(
        self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[list[Any], list[str | None]]:
        world = self._worlds.get(size) or World(size)
        self._worlds[size] = world
        results, texts = world.run((function, arguments))
        # if all ranks raised the same exception at the same place, no rank waits for another
        if len(set(texts)) > 1:
            self._worlds.pop(size).close()
        return results, texts


# ---- in the processes --------------------------------------------------------------------------


def serve(rank: int, size: int, pipe: Connection, store: str) -> None:
    """Connect to the other ranks and do jobs until the pipe closes."""
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
        except EOFError:
            return
        except Exception:
            pipe.send((None, traceback.format_exc()))
            continue
        try:
            answer = (function(Group.world("cpu"), *arguments), None)
        except Exception:
            answer = (None, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # the parent has closed the pipe
            return
        except Exception:
            pipe.send((None, traceback.format_exc()))
