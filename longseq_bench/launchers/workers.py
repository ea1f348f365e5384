"""Workers: launchers in processes of their own, whose trials run side by side on one host.

Each worker has devices that no other one has. It ends with this process, and with it its trial.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Lock, Thread, main_thread
from typing import Any, Self

from typing_extensions import override

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import LauncherError, LongseqError
from longseq_bench.core.gpus import VISIBLE
from longseq_bench.core.model import Device, DryRunEstimate, Place, Trial, environment_failure
from longseq_bench.launchers import fork_server
from longseq_bench.launchers.base import DRY_RUN_LIMIT_S, LAUNCHERS, Launcher, LaunchResult, OnPhase
from longseq_bench.launchers.exit_status import signal_name, with_first_attempt
from longseq_bench.launchers.interrupts import (
    block_interrupts,
    defer_interrupts,
    interrupt_on_termination,
)

END_S = 10.0
"""Time limit for a worker to end its trial and itself."""

_starting = Lock()


class WorkerEndedError(Exception):
    """The process of a worker has ended; the text says how."""


class Neighbours:
    """The trials that run side by side, by worker."""

    def __init__(self) -> None:
        self._lock, self._running = Lock(), dict[int, str]()
        self._beside: dict[int, set[str]] = {}

    def add(self, worker: int, implementation: str) -> None:
        """Note that a trial starts."""
        with self._lock:
            for other in self._running:
                self._beside[other].add(implementation)
            self._beside[worker] = {*self._running.values()}
            self._running[worker] = implementation

    def remove(self, worker: int) -> tuple[str, ...]:
        """Note that a trial ended; return the implementations that ran beside it."""
        with self._lock:
            del self._running[worker]
            return tuple(sorted(self._beside.pop(worker)))


class Worker(Launcher):
    """A launcher in a process of its own.

    number: from 1.  launcher: name of the launcher that the process uses.
    """

    def __init__(
        self, number: int, device: Device, devices: Sequence[str], launcher: str,
        neighbours: Neighbours,
    ) -> None:  # fmt: skip
        self.number, self._neighbours, self._closed = number, neighbours, False
        self._setup = launcher, device, tuple(devices)
        self._start()

    def _start(self) -> None:
        if self._closed:
            raise LauncherError(f"worker {self.number} is closed")
        with _starting, fork_server.hide_main(), fork_server.safe_helpers():
            resource_tracker.ensure_running()  # first, because its start unblocks Ctrl-C
            context = get_context("spawn")
            with defer_interrupts(), block_interrupts():
                self._pipe, child = context.Pipe()
                self._process = context.Process(target=_serve, args=(child, *self._setup))
                self._process.start()
                child.close()

    def _ask(self, method: str, *arguments: Any, on_phase: OnPhase | None = None) -> Any:
        """Return what a method of the process's launcher returns, or raise its error."""
        try:
            self._pipe.send((method, arguments))
            while True:
                kind, *answer = self._pipe.recv()
                if kind == "error":
                    raise answer[0]
                if kind == "result":
                    return answer[0]
                if on_phase:
                    on_phase(*answer)
        except (EOFError, OSError):
            self._process.join(END_S)
            code = self._process.exitcode or 0
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            raise WorkerEndedError(f"worker {self.number} {how}") from None

    @override
    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        found: Catalogue = self._ask("catalogue", own)
        return found

    @override
    def check(self, trials: Sequence[Trial]) -> None:
        self._ask("check", trials)

    @override
    def dry_run(
        self,
        trials: Sequence[Trial],
        limit: float = DRY_RUN_LIMIT_S,
        capability: tuple[int, int] | None = None,
    ) -> list[DryRunEstimate]:
        try:
            found: list[DryRunEstimate] = self._ask("dry_run", trials, limit, capability)
        except WorkerEndedError as error:
            self._start()
            return [DryRunEstimate(unsupported=str(error))] * len(trials)
        return found

    @override
    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        """Run a trial; if the process is killed meanwhile, run it once more in a new one."""
        self._neighbours.add(self.number, trial.implementation)
        try:
            result = self._run(trial, on_phase)
            if killed := result.outcome if result.processes == 0 else None:
                self._start()
                result = self._run(trial, on_phase)
                outcome = with_first_attempt(result.outcome, killed)
                result = LaunchResult(outcome, result.processes + trial.world_size)
        finally:
            neighbours = self._neighbours.remove(self.number)
        place = Place(worker=self.number, devices=self._setup[2], neighbours=neighbours)
        return replace(result, place=place)

    def _run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        """Return the result of a trial; one without processes if the worker ended."""
        try:
            result: LaunchResult = self._ask("run", trial, on_phase=on_phase)
        except WorkerEndedError as error:
            return LaunchResult(environment_failure(str(error)), 0)
        return result

    def terminate(self) -> None:
        """Ask the process to end its trial and itself; it starts no more."""
        self._closed = True
        self._process.terminate()

    @override
    def close(self) -> None:
        self.terminate()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, launcher: str, device: Device, devices: Sequence[str]) -> None:
    """Answer the requests of a Worker until its process ends."""
    os.setsid()  # Ctrl-C is for the parent, which ends its workers
    interrupt_on_termination()
    with suppress(KeyboardInterrupt, EOFError, ConnectionError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        Thread(target=_end_with_parent, daemon=True).start()
        if device == "cuda":
            os.environ[VISIBLE] = ",".join(devices)
        elif hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, map(int, devices))
        with LAUNCHERS.get(launcher)() as own:
            while True:
                _answer(pipe, own, *pipe.recv())


def _answer(pipe: Connection, launcher: Launcher, method: str, arguments: tuple[Any, ...]) -> None:
    if method == "run":
        arguments += (lambda *phase: pipe.send(("phase", *phase)),)
    try:
        answer = "result", getattr(launcher, method)(*arguments)
    except LongseqError as error:
        answer = "error", error
    pipe.send(answer)


def _end_with_parent() -> None:
    if parent := parent_process():
        wait([parent.sentinel])
    # to the main thread, whose wait for a trial ends by it
    signal.pthread_kill(main_thread().ident or 0, signal.SIGTERM)


class Workers:
    """The workers of a run, each with an equal part of the devices. A context manager."""

    def __init__(self, count: int, device: Device, devices: Sequence[str], launcher: str) -> None:
        each, neighbours = len(devices) // count, Neighbours()
        self._all, self._free = list[Worker](), SimpleQueue[Worker]()
        try:
            for i in range(count):
                own = devices[i * each : (i + 1) * each]
                self._all.append(Worker(i + 1, device, own, launcher, neighbours))
                self._free.put(self._all[i])
        except OSError as error:
            self.close()
            raise LauncherError(f"workers can't be started: {error}") from error

    def __len__(self) -> int:
        return len(self._all)

    @contextmanager
    def use_one(self) -> Iterator[Worker]:
        """Take a worker that is free."""
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all workers and their trials."""
        for worker in self._all:
            worker.terminate()
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
