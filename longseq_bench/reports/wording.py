"""Parts of sentences that sections share: limits on their number, and rankings with ties."""

from collections.abc import Callable, Iterable, Sequence

from longseq_bench.analysis.row import R
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.reports.document import MAX_FINDINGS

MAX_NAMES = 2
"""Maximum number of names in one sentence."""

UNCONFIRMED = "not confirmed by a second run"
"""Of a longest length that passed once: the search was interrupted, or used up its runs."""


def name_unconfirmed(row: SearchRow) -> str:
    """Return a clause if the longest length passed once only; fit-only searches have their own."""
    return "" if row.confirmations or row.fit_only else f", {UNCONFIRMED}"


def limit_findings(findings: Iterable[str]) -> list[str]:
    """Return at most MAX_FINDINGS; the last one is the number of those left out, if any."""
    known = list(findings)
    if len(known) <= MAX_FINDINGS:
        return known
    first = MAX_FINDINGS - 1
    return [*known[:first], f"{len(known) - first:,} more are in the tables."]


def join_names(names: Iterable[str], separator: str = ", ", max_names: int | None = None) -> str:
    """Return the first names of a sentence, then the number of further ones.

    max_names: MAX_NAMES if None.
    """
    named, count = list(names), MAX_NAMES if max_names is None else max_names
    more = len(named) - count
    return separator.join(named if more <= 0 else [*named[:count], f"{more:,} more"])


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
