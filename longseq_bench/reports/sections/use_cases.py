"""Name the best attention for each range of lengths, with the figures behind it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_seconds, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_with_interval
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Cell, Section, Table
from longseq_bench.reports.groups import (
    SHAPE,
    group_by_density,
    shape_key,
    split_by_sparsity,
    table_key,
)
from longseq_bench.reports.sections.recommendations import find_longest_ties, name_ties
from longseq_bench.reports.wording import find_ties, join_names

MAX_LENGTHS = 64
"""Maximum number of lengths, the longest, from which ranges are made."""

TITLE = "Which attention for which length"
_EXPLANATION = (
    "A range has the attention that is best at its end: the fastest that was timed more than once; "
    "without times, the longest maximum under any budget. Ran at: the length of its time and "
    "memory, or the longest of a search.",
    "Sparse attention does not compute what exact attention does. Of the rows that a range "
    "compares, only the densest (within 10 %) count, and their quality is not measured.",
)


Known = SweepRow | SearchRow
"""A row with a length that was ok: a swept one, or a search's longest."""


class Choice(NamedTuple):
    """The attention for a range of lengths.

    rows: the best row and its ties; empty if no length was long enough.
    is_only: no other attention of the kind ran as long.
    longest: the longest known row of the kind, for the range beyond its length.
    """

    tokens: str
    kind: str
    rows: Sequence[Known]
    is_only: bool = False
    longest: Known | None = None

    @property
    def best(self) -> Known | None:
        """The first of the rows."""
        return self.rows[0] if self.rows else None

    @property
    def is_compared(self) -> bool:
        """True if the rows are the best of several, not all that ran only once."""
        return isinstance(self.best, SearchRow) or (self.best is not None and self.best.samples > 1)


class _Kind:
    """The rows of exact or of sparse attention on one workload, under all budgets."""

    def __init__(self, kind: str, rows: Sequence[Known]) -> None:
        at_lengths = group_by(rows, attrgetter("tokens")).values()
        has_less_dense = kind == "sparse" and any(len(group_by_density(s)) > 1 for s in at_lengths)
        self.kind = "sparse, densest timed" if has_less_dense else kind
        self.rows = sorted(rows, key=attrgetter("tokens"))

    def _choose(self, tokens: int) -> Choice:
        """Return the attention for a length."""
        rows = _approach(self.rows, tokens)
        names = {row.name for row in self.rows if row.tokens >= tokens}
        return Choice("", self.kind, rows, len(names) == len(rows) == 1)

    def ranges(self, max_ranges: int) -> Iterator[Choice]:
        """Yield the attention of neighbouring ranges up to the longest length, and the rest.

        A range has the attention that is best at its end, so it can take all shorter lengths.
        """
        lengths = sorted({row.tokens for row in self.rows})[-MAX_LENGTHS:]
        by_end = {n: self._choose(n) for n in lengths}
        names = {n: _attention(choice) for n, choice in by_end.items()}
        ends = [one for one, other in pairwise(lengths) if names[one] != names[other]]
        ends = [*ends, lengths[-1]][-max_ranges:]
        start = "up to"
        for end in ends:
            yield by_end[end]._replace(tokens=f"{start} {format_tokens(end)}")
            start = f"{format_tokens(end)} to"
        yield Choice(f"beyond {format_tokens(ends[-1])}", self.kind, (), longest=self.rows[-1])


def uses(source: Source) -> Section:
    """Build a table per workload: the attention by range of lengths, over all budgets.

    The workload in which most implementations were searched, then timed, comes first.
    """
    known: list[Known] = [row for row in source.maxima if row.max_tokens and row.is_full_pass]
    known += [row for row in source.rows if row.is_ok and row.is_full_pass]

    def rank(rows: list[Known]) -> tuple[int, int]:
        searched = {row.implementation for row in rows if isinstance(row, SearchRow)}
        return -len(searched), -len({row.implementation for row in rows})

    groups = sorted(group_by(known, shape_key).values(), key=rank)
    return Section(TITLE, _EXPLANATION, tables=[_table(source, group) for group in groups])


def _table(source: Source, group: Sequence[Known]) -> Table:
    """Return the table of a workload, of at most MAX_ANSWER_ROWS rows."""
    kinds = [_Kind(*pair) for pair in split_by_sparsity(group).items()]
    own = MAX_ANSWER_ROWS // len(kinds) - 1
    choices = [choice for kind in kinds for choice in kind.ranges(own)]
    limit = ValueColumn("Limit", "text", lambda choice: _limit(source, choice), 5)
    return build_table(source.title(group[0], SHAPE, TITLE), (*_COLUMNS, limit), choices)


def _approach(rows: Sequence[Known], tokens: int) -> Sequence[Known]:
    """Return the best of the rows that are long enough, and its ties; the densest ones only.

    The fastest at the shortest length that was timed more than once; else the longest maximum; else
    all of the longest swept length.
    """
    enough = [row for row in rows if row.tokens >= tokens]
    timed = [r for r in enough if isinstance(r, SweepRow) and r.time_s and r.samples > 1]
    if timed:
        shortest = min(row.tokens for row in timed)
        at = group_by_density(row for row in timed if row.tokens == shortest)[0]
        at.sort(key=lambda row: require(row.time_s))
        return find_ties(at, "time_low_s", "time_high_s")
    if reached := [row for row in enough if isinstance(row, SearchRow)]:
        best = max(group_by_density(reached)[0], key=attrgetter("max_tokens"))
        others = [row for row in rows if isinstance(row, SearchRow) and row is not best]
        same = [row for row in others if table_key(row) == table_key(best)]
        return find_longest_ties([best, *(row for row in same if are_similar(row, best))])
    longest = max((row.tokens for row in enough), default=0)
    return group_by_density(row for row in enough if row.tokens == longest)[0] if enough else []


def are_similar(one: Known, other: Known) -> bool:
    """Return True for rows of similar density, which may be compared."""
    return len(group_by_density([one, other])) == 1


def _limit(source: Source, choice: Choice) -> str | None:
    """Return the budgets of a range; beyond the longest length also what ended its search."""
    row = choice.best or choice.longest
    words = [source.workload(row, _BUDGETS)] if row else []
    if isinstance(choice.longest, SearchRow):
        row = choice.longest
        ended = f"{row.limited_by} at {format_tokens(row.first_failure or 0)}"
        words.insert(0, ended if row.first_failure else "none reached")
        if row.fits_tokens and row.limited_by == "time":
            words.append(f"memory alone allows {format_tokens(row.fits_tokens)}")
    return ", ".join(filter(None, words)) or None


def _attention(choice: Choice) -> str:
    if choice.is_only:
        return f"only {choice.rows[0].name} ran this long"
    if choice.is_compared or len(choice.rows) == 1:
        return name_ties(choice.rows)
    names = join_names(row.name for row in choice.rows)
    return f"{names} (not compared)" if choice.rows else "none ran this long"


def _time(choice: Choice) -> Cell:
    """Return the time of the best; of a single pass, if it is the only row."""
    best = choice.best
    if not isinstance(best, SweepRow) or best.time_s is None:
        return None
    if choice.is_compared:
        return time_with_interval(best)
    return f"{format_seconds(best.time_s)} (one pass)" if len(choice.rows) == 1 else None


def _density(choice: Choice) -> float | None:
    return choice.best.density if choice.best and choice.best.is_sparse else None


def _ran_at(choice: Choice) -> int | None:
    """Return the length of the figures: for a search, its longest."""
    return choice.best.tokens if choice.best else None


def _peak(choice: Choice) -> int | None:
    return choice.best.peak_bytes if choice.best else None


_BUDGETS = ("memory_budget", "time_budget")
_COLUMNS = (
    ValueColumn("Tokens", "text", attrgetter("tokens"), 8),
    ValueColumn("Kind", "text", attrgetter("kind"), 6),
    ValueColumn("Attention", "text", _attention, 7),
    ValueColumn("Density", "share", _density, 2),
    ValueColumn("Ran at", "tokens", _ran_at, 3),
    ValueColumn("Time", "seconds", _time, 4),
    ValueColumn("Peak memory", "bytes", _peak, 1),
)
