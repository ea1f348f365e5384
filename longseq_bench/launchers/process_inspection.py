"""Processes seen from outside: who works and who waits, where each one is, and what they leave
behind. Of this host, for every launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from longseq_bench.core.model import Outcome
from longseq_bench.launchers import fork_server as fork_server
from longseq_bench.launchers.exit_status import stack_lines
from longseq_bench.launchers.output_file import OutputFile
from longseq_bench.launchers.rank_supervisor import GRACE_S, ProcessSample

LOOK_S, LOOKS = 0.5, 10
"""How long ranks are watched to tell who works from who waits, and how often they are looked at."""

STACKS_S, STACKS_STEP_S = 1.0, 0.05
"""How long ranks may take to write where they are, and how often that is looked at."""

STACK_BYTES = 2**16
"""How much of the end of a process's output is read for its stack."""


def look(pids: Mapping[int, int], several: bool) -> dict[int, ProcessSample]:
    """How ranks look from outside: who is stopped and, of several, who works. One that waits for a
    core on a busy host works too. A rank that is gone meanwhile is not in it."""
    found, start = {rank: _Watched(pid) for rank, pid in pids.items()}, time.monotonic()
    for _ in range(LOOKS if several else 1):
        time.sleep(LOOK_S / LOOKS if several else 0.0)
        for watched in found.values():
            watched.look()
    took = max(time.monotonic() - start, LOOK_S)
    return {rank: w.seen(took) for rank, w in found.items() if w.states}


class _Watched:
    """A process over a short time: its states, and the seconds of cores that it used."""

    def __init__(self, pid: int) -> None:
        self.pid, self.states, self.used = pid, list[str](), list[float]()
        self.look()
        self.states.clear()

    def look(self) -> None:
        try:
            process = psutil.Process(self.pid)
            self.states.append(process.status())
            times = process.cpu_times()
            self.used.append(times.user + times.system)
        except psutil.NoSuchProcess:
            self.states.clear()

    def seen(self, took: float) -> ProcessSample:
        ready = self.states.count(psutil.STATUS_RUNNING) / len(self.states)
        used = (self.used[-1] - self.used[0]) / took
        return ProcessSample(self.states[-1] == psutil.STATUS_STOPPED, max(ready, used))


def stacks(pids: Mapping[int, int], outputs: Mapping[int, OutputFile]) -> dict[int, list[str]]:
    """Where each rank is, from its own hand: a stopped one is woken to write it."""
    starts = {rank: outputs[rank].size() for rank in pids}
    for pid in pids.values():
        with suppress(ProcessLookupError):
            _ask_where(pid)
    end, written = time.monotonic() + STACKS_S, starts
    while pids and time.monotonic() < end:
        time.sleep(STACKS_STEP_S)
        before, written = written, {rank: outputs[rank].size() for rank in pids}
        if written == before and all(written[rank] > starts[rank] for rank in starts):
            break
    return {r: stack_lines(outputs[r].tail(starts[r], STACK_BYTES)) for r in pids}


def _ask_where(pid: int) -> None:
    """To the main thread where that can be said: a stopped one would walk on while another thread
    writes."""
    try:
        ctypes.CDLL(None).tgkill(pid, pid, signal.SIGUSR1)
    except AttributeError:
        os.kill(pid, signal.SIGUSR1)
    os.kill(pid, signal.SIGCONT)


def kill_orphans(server: int | None) -> list[str]:
    """End every process that a trial left to the fork server; one trial runs at a time. Returns
    their names. What is below any other process is nobody's to end."""
    if not server or server != fork_server.pid():
        return []
    with suppress(psutil.NoSuchProcess):
        orphans = psutil.Process(server).children(recursive=True)
        names = []
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                names.append(f"{orphan.name()} ({orphan.pid})")
                orphan.kill()
        psutil.wait_procs(orphans, timeout=GRACE_S)
        return names
    return []


def with_orphans_named(outcome: Outcome, orphans: list[str]) -> Outcome:
    """The same outcome, with what was left behind in its reason."""
    if not orphans:
        return outcome
    left = f"left {len(orphans)} process(es) behind, killed: {', '.join(orphans)}"
    reason = f"{outcome.reason}; {left}" if outcome.reason else left
    return outcome.model_copy(update={"reason": reason})
