"""Parts of sentences that sections share: limits on their number, and rankings with ties."""

from collections.abc import Callable, Iterable, Sequence

from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.runs import REMEDY, group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Status
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.document import MAX_FINDINGS

MAX_NAMES = 2
"""Maximum number of names in one sentence."""
TIE = "no significant difference"
UNCONFIRMED = "not confirmed by a second run"
"""Of a longest length that passed once: the search was interrupted, or used up its runs."""


def limit_findings(findings: Iterable[str]) -> list[str]:
    """Return at most MAX_FINDINGS; the last one is the number of those left out, if any."""
    known = list(findings)
    if len(known) <= MAX_FINDINGS:
        return known
    first = MAX_FINDINGS - 1
    return [*known[:first], f"{len(known) - first:,} more are in the tables."]


def join_names(names: Iterable[str]) -> str:
    """Return the first MAX_NAMES names of a sentence, then the number of further ones."""
    named = list(names)
    more = len(named) - MAX_NAMES
    return ", ".join([*named[:MAX_NAMES], f"{more:,} more"] if more > 0 else named)


def format_range(values: Sequence[float], write: Callable[[float], str]) -> str:
    """Return the smallest and the largest value: "2× to 3×"; one where their texts are equal."""
    return " to ".join(dict.fromkeys(write(value) for value in (min(values), max(values))))


def find_ties(ordered: Sequence[R], low: str, high: str, largest: bool = False) -> list[R]:
    """Return the best row and those whose intervals overlap with its own.

    ordered: rows, the best first.  low, high: fields of the bounds; a missing bound
    overlaps.  largest: the best has the largest value, not the smallest.
    """
    own, other = (low, high) if largest else (high, low)
    end = getattr(ordered[0], own)

    def overlaps(row: R) -> bool:
        bound = getattr(row, other)
        return None in (bound, end) or (bound >= end if largest else bound <= end)

    return [row for row in ordered if overlaps(row)]


def find_longest_ties(rows: Sequence[SearchRow]) -> list[SearchRow]:
    """Return the longest row, and those whose bracket does not exclude its length."""
    ordered = sorted(rows, key=lambda row: -row.max_tokens)
    most = ordered[0].max_tokens
    return [r for r in ordered if r.max_tokens >= most or (r.first_failure or most + 1) > most]


def name_ties(rows: Sequence[Row]) -> str:
    """Return the name of the best row; of several, that they do not differ, and their names."""
    names = join_names(row.name for row in rows)
    return names if len(rows) == 1 else f"{TIE}: {names}"


# ---- outcomes in words ---------------------------------------------------------------------------


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
