"""How a trial ended, in a few words: reports and the terminal share the wording."""

from __future__ import annotations

from longseq_bench.core.model import Status


def describe_outcome(status: Status, phase: str | None, reason: str | None) -> str:
    """Return how a trial ended: "out of memory in forward", "unsupported: runs on one rank".

    The allocator's text is left out: it repeats the status, and the record keeps it.
    """
    where = f" in {phase}" if phase and status != "unsupported" else ""
    if status == "oom":
        return f"out of memory{where}"
    return f"{status}{where}: {reason}" if reason else f"{status}{where}"
