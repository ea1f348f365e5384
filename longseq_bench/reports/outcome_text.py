"""The outcome of a trial in a few words, shared by reports and the terminal."""

import re
from collections.abc import Iterable

from longseq_bench.analysis.runs import REMEDY, group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Outcome, Status
from longseq_bench.core.units import format_bytes, format_tokens

_ALLOCATION = re.compile(
    r"(?P<who>(?:every )?rank[^:]*: )?.*?ried to allocate (?P<size>\d+ bytes|[\d.]+ [KMGT]iB)\b"
)
"""The start of an allocator's text: the ranks it is of, and the size that it refused."""


def name_status(status: Status) -> str:
    """Return a status as words: "out of memory" for oom."""
    return "out of memory" if status == "oom" else status


def describe_outcome(status: Status, phase: str | None, reason: str | None) -> str:
    """Return how a trial ended: "out of memory in forward", "unsupported: runs on one rank".

    The allocator's text is left out: it repeats the status, and the record keeps it.
    """
    where = f" in {phase}" if phase and status != "unsupported" else ""
    detail = f": {reason}" if reason and status != "oom" else ""
    return f"{name_status(status)}{where}{detail}"


def shorten_reason(outcome: Outcome) -> str | None:
    """Return the reason of a failure; of an allocator's text, the ranks and the refused size."""
    found = _ALLOCATION.match(outcome.reason or "") if outcome.status == "oom" else None
    if found is None:
        return outcome.reason
    number, _, unit = found["size"].partition(" ")
    size = format_bytes(int(number)) if unit == "bytes" else found["size"]
    return f"{found['who'] or ''}could not allocate {size}"


def describe_unstable(rows: Iterable[SweepRow]) -> list[str]:
    """Return a sentence on the rows whose time is not to be trusted, with the reason of one."""
    unstable = [row for row in rows if row.unstable]
    if not unstable:
        return []
    first, more = unstable[0], len(unstable) - 1
    return [
        f"Unstable: {first.name} at {format_tokens(first.tokens)} tokens ({first.unstable})"
        f"{f' and {more:,} more' if more else ''}; {REMEDY}. `longseq doctor` lists causes."
    ]


def describe_failures(rows: Iterable[SweepRow]) -> list[str]:
    """Return a sentence per outcome of the rows that failed: the first row, and how many more."""
    failed = group_by(
        (row for row in rows if row.status != "ok"),
        lambda row: describe_outcome(row.status, row.phase, row.reason),
    )
    return [
        f"{group[0].name} at {format_tokens(group[0].tokens)}"
        f"{f' and {len(group) - 1:,} more' if len(group) > 1 else ''}: {outcome}"
        for outcome, group in failed.items()
    ]
