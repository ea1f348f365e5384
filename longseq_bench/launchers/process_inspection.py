"""Inspect the processes of a trial on this host: CPU use, stacks, and processes left behind."""

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from longseq_bench.core.ranks import issuing_threads_s
from longseq_bench.launchers import fork_server
from longseq_bench.launchers.exit_status import OutputFile, stack_lines
from longseq_bench.launchers.rank_supervisor import GRACE_S, ProcessSample

SAMPLE_S, SAMPLES = 0.5, 10
"""Time and number of samples needed to distinguish a working rank from a waiting one."""

STACKS_S, STACKS_STEP_S = 1.0, 0.05
"""Time limit for ranks to write their stacks, and the interval of checks."""

STACK_BYTES = 2**16
"""Bytes at the end of a rank's output that are searched for its stack."""


def sample_processes(
    pids: Mapping[int, int], several: bool, device: str = "cpu"
) -> dict[int, ProcessSample]:
    """Return samples of the processes of ranks, by rank, without ranks that ended.

    several: also measure for 0.5 s how busy they are. A rank that waits for a core counts as busy.
    device: on cuda only threads that issue work count; those of NCCL spin while they wait.
    """
    readings, start = [_read_processes(pids, device)], time.monotonic()
    for _ in range(SAMPLES if several else 1):
        time.sleep(SAMPLE_S / SAMPLES if several else 0.0)
        readings.append(_read_processes(pids, device))
    elapsed_s = max(time.monotonic() - start, SAMPLE_S)
    samples = {}
    for rank in pids:
        if all(rank in reading for reading in readings):
            states = [reading[rank][0] for reading in readings[1:]]
            runnable = states.count(psutil.STATUS_RUNNING) / len(states)
            cpu_use = (readings[-1][rank][1] - readings[0][rank][1]) / elapsed_s
            stopped = states[-1] == psutil.STATUS_STOPPED
            samples[rank] = ProcessSample(stopped, max(runnable, cpu_use))
    return samples


def _read_processes(pids: Mapping[int, int], device: str) -> dict[int, tuple[str, float]]:
    """Return the state and the CPU time in s of each process that still exists, by rank."""
    readings: dict[int, tuple[str, float]] = {}
    for rank, pid in pids.items():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            of_all = process.cpu_times()
            cpu_s = issuing_threads_s(process) if device == "cuda" else of_all.user + of_all.system
            readings[rank] = process.status(), cpu_s
    return readings


def read_stacks(pids: Mapping[int, int], outputs: Mapping[int, OutputFile]) -> dict[int, list[str]]:
    """Make each rank write its stack to its output file, and return the stacks.

    A stopped rank writes none.
    """
    starts = {rank: outputs[rank].size() for rank in pids}
    for pid in pids.values():
        with suppress(ProcessLookupError):
            try:
                # the main thread: it would run on if another one wrote the stacks
                ctypes.CDLL(None).tgkill(pid, pid, signal.SIGUSR1)
            except AttributeError:  # macOS, and glibc before 2.30
                os.kill(pid, signal.SIGUSR1)
    end, sizes = time.monotonic() + STACKS_S, starts
    while pids and time.monotonic() < end:
        time.sleep(STACKS_STEP_S)
        before, sizes = sizes, {rank: outputs[rank].size() for rank in pids}
        if sizes == before and all(sizes[rank] > starts[rank] for rank in starts):
            break
    return {r: stack_lines(outputs[r].tail(starts[r], STACK_BYTES)) for r in pids}


def kill_orphans() -> None:
    """Kill the orphaned processes of a trial, which the fork server adopts.

    One trial runs at a time, so all children of our server belong to it. Children of other
    processes are not touched.
    """
    if not (server := fork_server.pid()):
        return
    with suppress(psutil.NoSuchProcess):
        orphans = psutil.Process(server).children(recursive=True)
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        psutil.wait_procs(orphans, timeout=GRACE_S)
