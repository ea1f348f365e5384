"""What a child's end means, and what it leaves behind, written once for every launcher."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import psutil

from longseq_bench.core.model import Outcome, Phase
from longseq_bench.core.stack_markers import CHILD_MAIN

NATIVE_DEATHS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
"""Signals by which native code dies where an allocation of its own was not checked."""

STACK_LINES = 25
"""Of a rank's stack, innermost first."""

_NCCL_ABORTS = "ProcessGroupNCCL"
"""In what a rank prints whose NCCL watchdog ends it, as it does where a peer is gone."""

_VMSTAT = Path("/proc/vmstat")
_SHARED = Path("/dev/shm")
_SHARED_NAME = "nccl-*"
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


def may_be_out_of_memory(outcome: Outcome, signal_number: int) -> bool:
    """Whether a trial that failed under a budget deserves another try with more of it.

    Seen on CPU near the edge, all cured by room: SIGSEGV in fused kernels, oneDNN's "could not
    create a primitive", and bfloat16 outputs that were silently wrong.
    """
    if outcome.facts.get("lost_peer"):
        return False
    if outcome.status == "crashed":
        return signal_number in NATIVE_DEATHS
    return outcome.status == "wrong" or "RuntimeError" in (outcome.reason or "")


def outcome_of_exit(exitcode: int, phase: Phase, printed: str, kernel_killed: bool) -> Outcome:
    """The outcome of a child that ended without saying one.

    exitcode: negative for a signal. printed: the end of its output. kernel_killed: whether the
    kernel's out-of-memory killer struck meanwhile.
    """
    facts: dict[str, object] = {}
    if printed.strip():
        facts["output"] = [line[:200] for line in printed.splitlines()[-30:]]
    if exitcode == -signal.SIGKILL and kernel_killed:
        reason = "killed by the kernel's out-of-memory killer"
        return Outcome(status="oom", reason=reason, phase=phase, facts=facts)
    if exitcode < 0:
        reason = f"killed by {signal_name(-exitcode)}"
    elif exitcode:
        reason = f"ended with exit code {exitcode}"
    else:
        reason = "ended with exit code 0 without a result"
    if exitcode == -signal.SIGABRT and _NCCL_ABORTS in printed:
        facts["lost_peer"] = True
    return Outcome(status="crashed", reason=reason, phase=phase, facts=facts)


def signal_name(number: int) -> str:
    """SIGSEGV for 11; the number itself where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kernel_kills() -> int:
    """How often the kernel's out-of-memory killer has struck since boot; 0 where unknown."""
    try:
        for line in _VMSTAT.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def stack_lines(dumped: str) -> list[str]:
    """What faulthandler printed, as `file:line function`, innermost first, down to where a child
    begins; the main thread first, which it prints last. Files are named below site-packages, or by
    folder and name."""
    threads: list[list[str]] = []
    for line in dumped.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            path, number, function = frame.groups()
            short = _PACKAGES.sub("", path)
            short = "/".join(Path(path).parts[-2:]) if short == path else short
            threads[-1].append(f"{short}:{number} {function}")
    found: list[str] = []
    for thread in reversed(threads):
        lines = list(takewhile(lambda line: function_of(line) != CHILD_MAIN, thread))
        found += ["of another thread:", *lines] if found and lines else lines
    return found[:STACK_LINES]


def function_of(stack_line: str) -> str:
    """Return the function named in a line of `stack_lines`."""
    return stack_line.rpartition(" ")[2]


def find_nccl_files() -> set[Path]:
    """The shared memory between ranks that NCCL has named for this user."""
    found = set()
    for path in _SHARED.glob(_SHARED_NAME):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def remove_nccl_files(before: set[Path]) -> None:
    """Remove what appeared since `before` and nobody has open: ranks that were killed can't."""
    if new := find_nccl_files() - before:
        for path in new - set(_opened()):
            with suppress(OSError):
                path.unlink()


def _opened() -> Iterator[Path]:
    """Shared memory that a living process has mapped or open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            yield from (Path(mapped.path) for mapped in process.memory_maps())
        with suppress(psutil.Error, OSError):
            yield from (Path(file.path) for file in process.open_files())
