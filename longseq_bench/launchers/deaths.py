"""What a child's end means, written once for every launcher."""

from __future__ import annotations

import signal
from pathlib import Path

from longseq_bench.model import Outcome, Phase

NATIVE_DEATHS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
"""Signals by which native code dies where an allocation of its own was not checked."""

_VMSTAT = Path("/proc/vmstat")


def memory_may_be_why(outcome: Outcome, signal_number: int) -> bool:
    """Whether a trial that failed under a budget deserves another try with more of it.

    Seen on CPU near the edge, all cured by room: SIGSEGV in fused kernels, oneDNN's "could not
    create a primitive", and bfloat16 outputs that were silently wrong.
    """
    if outcome.status == "crashed":
        return signal_number in NATIVE_DEATHS
    return outcome.status == "wrong" or "RuntimeError" in (outcome.reason or "")


def outcome_of_exit(exitcode: int, phase: Phase, printed: str, kernel_killed: bool) -> Outcome:
    """The outcome of a child that ended without saying one.

    exitcode: negative for a signal. printed: the end of its output. kernel_killed: whether the
    kernel's out-of-memory killer struck meanwhile.
    """
    facts = (
        {"output": [line[:200] for line in printed.splitlines()[-30:]]} if printed.strip() else {}
    )
    if exitcode == -signal.SIGKILL and kernel_killed:
        reason = "killed by the kernel's out-of-memory killer"
        return Outcome(status="oom", reason=reason, phase=phase, facts=facts)
    if exitcode < 0:
        reason = f"killed by {signal_name(-exitcode)}"
    elif exitcode:
        reason = f"ended with exit code {exitcode}"
    else:
        reason = "ended with exit code 0 without a result"
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
