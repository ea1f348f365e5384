"""Read the exit status, the output and the stacks of a child.

A child that raises an exception reports its outcome itself (worker/verdicts.py). One that dies
without a report has that of its exit status (`outcome_of_exit`). SIGKILL is out of memory only if
the kernel's out-of-memory killer was active. A signal from outside, such as SIGTERM of a batch
system, is no failure of the trial.

launchers/local.py runs some failures again: as they are (`failed_by_device`), or with more memory
(`may_be_out_of_memory`).
"""

import fcntl
import os
import re
import signal
import tempfile
from itertools import takewhile
from multiprocessing.reduction import DupFd
from operator import methodcaller
from pathlib import Path
from typing import Any

from longseq_bench.core.errors import LauncherError
from longseq_bench.core.files import read_text
from longseq_bench.core.gpus import explain_broken_gpu
from longseq_bench.core.model import Outcome, Phase, environment_failure
from longseq_bench.core.ranks import CHILD_MAIN

NATIVE_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
"""Signals that may mean that native code used a failed allocation."""

SENT_FROM_OUTSIDE = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
"""Signals that batch systems, shells and users send. A trial does not end itself by them."""

STACK_LINES = 25
"""Lines kept of a rank's stack, innermost first."""

_NCCL_ABORTS = "ProcessGroupNCCL"
"""Text in the output of a rank that NCCL's watchdog aborts because a peer is gone."""

_VMSTAT = Path("/proc/vmstat")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


def may_be_out_of_memory(outcome: Outcome, signal_number: int) -> bool:
    """Return whether a failure under a memory budget may be an unchecked allocation.

    Seen on the CPU near the limit, and gone with more memory: SIGSEGV in fused kernels,
    oneDNN's "could not create a primitive", and wrong bfloat16 outputs.
    """
    if outcome.facts.get("lost_peer") or failed_by_device(outcome):
        return False
    if outcome.status == "crashed":
        return signal_number in NATIVE_CRASHES
    return outcome.status == "wrong" or "RuntimeError" in (outcome.reason or "")


def failed_by_device(outcome: Outcome) -> bool:
    """Return True if the GPU or NCCL failed. A fresh process may run without that error."""
    return bool(outcome.facts.get("device_error"))


def with_first_attempt(outcome: Outcome, first: Outcome) -> Outcome:
    """Return the outcome of a second process, with the failure of the first in its reason."""
    if outcome.reason == first.reason:
        text = f"{first.reason}; a second process failed in the same way"
    elif outcome.status == "ok":
        text = f"passed in a second process; the first failed: {first.reason}"
    else:
        text = f"{outcome.reason}; a first process failed: {first.reason}"
    facts = {**outcome.facts, "first_attempt": first.reason}
    return outcome.model_copy(update={"reason": text, "facts": facts})


def outcome_of_exit(exitcode: int, phase: Phase, printed: str, kernel_killed: bool) -> Outcome:
    """Return the outcome of a child that ended without reporting one.

    phase: the last one that it reported.  printed: the end of its output.
    kernel_killed: True if the kernel's out-of-memory killer was active during the trial.
    """
    facts: dict[str, object] = {}
    if printed.strip():
        facts["output"] = [line[:200] for line in printed.splitlines()[-30:]]
    if exitcode == -signal.SIGKILL and kernel_killed:
        reason = "killed by the kernel's out-of-memory killer"
        return Outcome(status="oom", reason=reason, phase=phase, facts=facts)
    if -exitcode in SENT_FROM_OUTSIDE:
        ended = environment_failure(f"killed by {signal_name(-exitcode)}", phase)
        return ended.model_copy(update={"facts": {**ended.facts, **facts}})
    if exitcode < 0:
        reason = f"killed by {signal_name(-exitcode)}"
    elif exitcode:
        reason = f"ended with exit code {exitcode}"
    else:
        reason = "ended with exit code 0 without a result"
    if sentence := explain_broken_gpu(printed):
        reason, facts["device_error"] = f"{reason}: {sentence}", True
    if exitcode == -signal.SIGABRT and _NCCL_ABORTS in printed:
        facts["lost_peer"] = True
    return Outcome(status="crashed", reason=reason, phase=phase, facts=facts)


def signal_name(number: int) -> str:
    """Return the name of a signal ("SIGSEGV" for 11), or "signal <number>"."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")


def kernel_kills() -> int:
    """Return the number of kills by the kernel's out-of-memory killer since boot; 0 if unknown."""
    found = re.search(r"^oom_kill (\d+)$", read_text(_VMSTAT), re.MULTILINE)
    return int(found[1]) if found else 0


def stack_lines(dumped: str) -> list[str]:
    """Parse faulthandler's output into lines `file:line function`, innermost frame first.

    Frames below CHILD_MAIN are dropped. The main thread, which faulthandler prints last, comes
    first. Files are relative to site-packages; other files are shown as folder/name.
    """
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


# ---- what a child prints -------------------------------------------------------------------------
# The file has no name, so it can't be left behind.

PRINTED_BYTES = 4000
"""Bytes of the end of the output that are read by default."""


class OutputFile:
    """The output of a child, in the parent.

    Pass it among the arguments of the child's process: in the child it is an open file descriptor
    (int).

    Raises LauncherError if it can't be created, for example because the disk is full.
    """

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        except OSError as error:
            where = f"the output of a child can't be kept in {tempfile.gettempdir()} (TMPDIR)"
            raise LauncherError(f"{where}: {error.strerror or error}") from error
        # append: a process that opens /dev/stdout again has its own offset
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)

    def fileno(self) -> int:
        """Return the descriptor in this process."""
        return self._file.fileno()

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("detach"), (DupFd(self.fileno()),)

    def size(self) -> int:
        """Return the number of bytes written so far."""
        return os.fstat(self.fileno()).st_size

    def tail(self, start: int = 0, max_bytes: int = PRINTED_BYTES) -> str:
        """Return the end of the output, at most `max_bytes`, from byte `start` on."""
        size = self.size()
        start = max(start, size - max_bytes)
        # pread: the offset is shared with the process that prints
        return os.pread(self.fileno(), size - start, start).decode(errors="replace")

    def close(self) -> None:
        """Close this end. The process that prints is not affected."""
        self._file.close()
