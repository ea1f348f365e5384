"""Name the best attention for each range of lengths, with the figures behind it."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_seconds, format_tokens
from longseq_bench.reports.base import MAX_TABLES, Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_with_interval
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Cell, Section
from longseq_bench.reports.groups import (
    SHAPE,
    group_by_density,
    join_words,
    shape_key,
    split_by_sparsity,
    table_key,
)
from longseq_bench.reports.wording import find_longest_ties, find_ties, join_names, name_ties

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

    rows: the best row and its ties; empty beyond the longest length.
    longest: the longest known row of the kind, for the range beyond its length.
    """

    tokens: str
    kind: str
    attention: str
    rows: Sequence[Known] = ()
    longest: Known | None = None

    @property
    def best(self) -> Known | None:
        """The first of the rows."""
        return self.rows[0] if self.rows else None


def uses(source: Source) -> Section:
    """Build a table per workload: the attention by range of lengths, over all budgets.

    The workload in which most implementations were searched, then timed, comes first.
    """
    known: list[Known] = [row for row in source.maxima if row.max_tokens and row.is_full_pass]
    known += [row for row in source.rows if row.is_ok and row.is_full_pass]

    def rank(rows: list[Known]) -> tuple[int, int]:
        searched = {row.implementation for row in rows if isinstance(row, SearchRow)}
        return -len(searched), -len({row.implementation for row in rows})

    limit = ValueColumn("Limit", "text", lambda choice: _limit(source, choice), 5)
    tables = []
    for group in sorted(group_by(known, shape_key).values(), key=rank)[:MAX_TABLES]:
        kinds = split_by_sparsity(group)
        most = MAX_ANSWER_ROWS // len(kinds) - 1
        choices = [choice for kind, rows in kinds.items() for choice in _ranges(kind, rows, most)]
        title = source.title(group[0], SHAPE, TITLE)
        tables.append(build_table(title, (*_COLUMNS, limit), choices))
    return Section(TITLE, _EXPLANATION, tables=tables)


def _ranges(kind: str, rows: Sequence[Known], max_ranges: int) -> Iterator[Choice]:
    """Yield the attention of neighbouring ranges up to the longest length, and the rest.

    A range has the attention that is best at its end, so it can take all shorter lengths.
    """
    by_length = dict(sorted(group_by(rows, attrgetter("tokens")).items()))
    if kind == "sparse" and any(len(group_by_density(some)) > 1 for some in by_length.values()):
        kind = "sparse, densest timed"
    found: list[tuple[int, Choice]] = []
    for tokens in [*by_length][-MAX_LENGTHS:]:
        best = _choose(rows, tokens)
        attention = _name(best, len({row.name for row in rows if row.tokens >= tokens}))
        if found and found[-1][1].attention == attention:
            found.pop()
        found.append((tokens, Choice("", kind, attention, best)))
    start = "up to"
    for end, choice in found[-max_ranges:]:
        yield choice._replace(tokens=f"{start} {format_tokens(end)}")
        start = f"{format_tokens(end)} to"
    end, longest = by_length.popitem()
    yield Choice(f"beyond {format_tokens(end)}", kind, "none ran this long", longest=longest[-1])


def _choose(rows: Sequence[Known], tokens: int) -> Sequence[Known]:
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
        same = [
            row
            for row in rows
            if isinstance(row, SearchRow) and row is not best and table_key(row) == table_key(best)
            if len(group_by_density([row, best])) == 1
        ]
        return find_longest_ties([best, *same])
    longest = max(row.tokens for row in enough)
    return group_by_density(row for row in enough if row.tokens == longest)[0]


def _name(rows: Sequence[Known], count: int) -> str:
    """Name the best rows.  count: names that ran as long."""
    if count == len(rows) == 1:
        return f"only {rows[0].name} ran this long"
    if isinstance(rows[0], SearchRow) or rows[0].samples > 1 or len(rows) == 1:
        return name_ties(rows)
    return f"{join_names(row.name for row in rows)} (not compared)"


def _limit(source: Source, choice: Choice) -> str | None:
    """Return the budgets of a range; beyond the longest length also what ended its search."""
    row, words, fits = choice.best or require(choice.longest), "", ""
    if not choice.rows and isinstance(row, SearchRow):
        ended = f"{row.limited_by} at {format_tokens(row.first_failure or 0)}"
        words = ended if row.first_failure else "none reached"
        if row.fits_tokens and row.limited_by == "time":
            fits = f"memory alone allows {format_tokens(row.fits_tokens)}"
    budgets = source.workload(row, ("memory_budget", "time_budget"))
    return join_words(words, budgets, fits) or None


def _time(choice: Choice) -> Cell:
    """Return the time of the best; of a single pass, if it is the only row."""
    best = choice.best
    if not isinstance(best, SweepRow) or best.time_s is None:
        return None
    if best.samples > 1:
        return time_with_interval(best)
    return f"{format_seconds(best.time_s)} (one pass)" if len(choice.rows) == 1 else None


def _density(choice: Choice) -> float | None:
    return choice.best.density if choice.best and choice.best.is_sparse else None


_COLUMNS = (
    ValueColumn("Tokens", "text", attrgetter("tokens"), 8),
    ValueColumn("Kind", "text", attrgetter("kind"), 6),
    ValueColumn("Attention", "text", attrgetter("attention"), 7),
    ValueColumn("Density", "share", _density, 2),
    ValueColumn("Ran at", "tokens", lambda choice: choice.best and choice.best.tokens, 3),
    ValueColumn("Time", "seconds", _time, 4),
    ValueColumn("Peak memory", "bytes", lambda choice: choice.best and choice.best.peak_bytes, 1),
)
