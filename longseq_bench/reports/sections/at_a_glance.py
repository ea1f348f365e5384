"""One line per implementation: its time at one length, and the longest length that it reached."""

from collections.abc import Callable, Hashable, Iterable
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeVar

from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_or_status
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Cell, Section, Table
from longseq_bench.reports.groups import common_length, group_by_workload, in_brackets, table_key
from longseq_bench.reports.outcome_text import name_status
from longseq_bench.reports.sections.by_length import ByLength, by_length

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", SweepRow, SearchRow)
ALL = "All implementations"
"""Title of the section with the lines that the first screen leaves out."""


class Longest(NamedTuple):
    """The longest length of a search.  where: its workload, if it is not that of most searches."""

    row: SearchRow
    where: str

    def describe(self, variant: str = "") -> str:
        """Return "90,000 (ring, 10 min limit)".  variant: name of the row, if it is not stated."""
        tokens = f"{self.row.max_tokens:,}" if self.row.max_tokens else "none passed"
        return tokens + in_brackets(", ".join(filter(None, (variant, self.where))))


class Glance(NamedTuple):
    """The line of an implementation; its fastest and its longest variant may differ.

    timed: its fastest row at the common length; if none was ok there, a row that failed.
    passed: its longest row that was ok.  failed: its first row above it, which failed.
    """

    implementation: str
    timed: SweepRow | None
    passed: SweepRow | None
    failed: SweepRow | None
    longest: Longest | None


class Overview(NamedTuple):
    """Every implementation of the records, the fastest first; every label if there is only one.

    swept: rows of the workload that most implementations share.  at: those of the common length.
    searched: searches of the workload that most implementations share.
    noun: what a line is of.
    best: the best of each length, if `swept` has not all lengths of its shape; else None.
    """

    noun: str
    swept: list[SweepRow]
    at: list[SweepRow]
    searched: list[SearchRow]
    lines: list[Glance]
    best: ByLength | None

    def table(self, source: Source, max_rows: int | None = None) -> Table | None:
        """Return the first lines as a table; None if no line has more than a name.

        Exact and sparse attention are in one table, so the share of the pairs has a column.
        """
        is_swept = any(line.passed and not line.longest for line in self.lines)
        columns = [one for one in _COLUMNS if one.heading != "Longest swept" or is_swept]
        count = len(self.lines)
        cut = max_rows is not None and count > max_rows
        title = f"{max_rows} of {count:,} {self.noun}s" if cut else f"One line per {self.noun}"
        if self.at:
            title += f"; time and peak memory at {format_tokens(self.at[0].tokens)} tokens"
        if self.at and self.searched and table_key(self.at[0]) != table_key(self.searched[0]):
            title += f"; longest: {source.workload(self.searched[0])}"
        table = build_table(title, columns, self.lines[:max_rows])
        return table if len(table.columns) > 1 else None

    def context(self, source: Source) -> list[str]:
        """Name the workloads of the times and of the longest lengths, where there are several."""
        of_times = source.workload(self.at[0]) if self.at else ""
        of_lengths = source.workload(self.searched[0]) if self.searched else ""
        if of_times == of_lengths:
            return [f"All figures: {of_times}."] if of_times else []
        named = {"Times and memory": of_times, "Longest lengths": of_lengths}
        return [f"{name}: {words}." for name, words in named.items() if words]


def overview(source: Source) -> Overview:
    """Choose workload and length that most implementations share, and the best of each."""
    names = dict.fromkeys(record.trial.implementation for record in source.records)
    rows = [*source.rows, *source.maxima]
    noun, key = "implementation", attrgetter("implementation")
    if len(names) == 1 and rows:
        noun, key = "variant", attrgetter("label")
        names = dict.fromkeys(map(key, rows))
    swept = most_shared(row for row in source.rows if row.is_full_pass)
    at = common_length(swept, key)
    timed = {name: min(some, key=_cost) for name, some in group_by(at, key).items()}
    by_name = group_by(swept, key)
    searched, longest = find_longest(source, key)
    lines = [
        Glance(name, timed.get(name), *find_end(by_name.get(name, ())), longest.get(name))
        for name in names
    ]
    best = by_length(source)
    has_more = len(best.lengths) > len({row.tokens for row in swept if row.is_ok})
    return Overview(
        noun, swept, at, searched, sorted(lines, key=_order), best if has_more else None
    )


def all_implementations(source: Source) -> Section:
    """Build the table of all lines, if the first screen has not all of them."""
    found = overview(source)
    is_cut = len(found.lines) > MAX_ANSWER_ROWS or found.best
    table = found.table(source) if is_cut else None
    note = "A line has the fastest and the longest variant of an implementation."
    return Section(ALL, [*found.context(source), note], tables=[table]) if table else Section(ALL)


def most_shared(rows: Iterable[T]) -> list[T]:
    """Return the rows of the workload that most implementations have.

    Of equal ones that with the most labels, then the first.
    """
    groups = group_by_workload(rows)

    def count(group: list[T]) -> tuple[int, int]:
        found = [row for row in group if row.tokens]
        return len({row.implementation for row in found}), len({row.label for row in found})

    return max(groups, key=count, default=[])


def find_longest(
    source: Source, key: Callable[[SearchRow], K]
) -> tuple[list[SearchRow], dict[K, Longest]]:
    """Return the searches of the workload that most implementations share, and the longest by key.

    Confirmed lengths come before those that only fit or overwrite their inputs.
    """
    searched = most_shared(row for row in source.maxima if row.is_full_pass)
    found: dict[K, Longest] = {}
    for rows, is_shared in ((searched, True), (source.maxima, False)):
        for name, some in group_by(rows, key).items():
            row = max(some, key=lambda row: (row.is_full_pass, row.max_tokens))
            found.setdefault(name, Longest(row, "" if is_shared else source.workload(row)))
    return searched, found


def find_end(rows: Iterable[SweepRow]) -> tuple[SweepRow | None, SweepRow | None]:
    """Return the longest row that was ok, and the next longer row of its label, which failed."""
    ordered = sorted(rows, key=attrgetter("tokens"))
    passed = max((r for r in ordered if r.is_ok), key=attrgetter("tokens"), default=None)
    longer = (r for r in ordered if passed is None or r.tokens > passed.tokens)
    named = (r for r in longer if passed is None or r.name == passed.name)
    return passed, next(named, None)


def _cost(row: SweepRow) -> float:
    return row.time_s if row.is_ok and row.time_s else inf


def _order(line: Glance) -> tuple[float, int]:
    """Order by time, then by length; implementations without a time come last."""
    cost = _cost(line.timed) if line.timed else inf
    return cost, -(line.longest.row.max_tokens if line.longest else 0)


def _name(line: Glance) -> str:
    best = line.timed or (line.longest and line.longest.row)
    return best.name if best else line.implementation


def _density(line: Glance) -> float | str | None:
    """Return the share of the pairs; "sparse" for a search, which records no such share."""
    row = line.timed
    if row and row.is_ok:
        return row.token_density if row.is_sparse else None
    return "sparse" if line.longest and line.longest.row.is_sparse else None


def _peak(line: Glance) -> int | None:
    return line.timed.peak_bytes if line.timed and line.timed.is_ok else None


def _longest(line: Glance) -> Cell:
    if line.longest is None:
        return None
    name = line.longest.row.name
    return line.longest.describe(name if line.timed and name != line.timed.name else "")


def describe_end(passed: SweepRow | None, failed: SweepRow | None) -> str | None:
    """Return "32k", with the failure above it: "32k, timeout at 64k"; None without rows."""
    words = [format_tokens(passed.tokens)] if passed else []
    if failed:
        words.append(f"{name_status(failed.status)} at {format_tokens(failed.tokens)}")
    return ", ".join(words) or None


_COLUMNS = (
    ValueColumn("Implementation", "text", _name),
    ValueColumn("Pairs seen", "share", _density),
    ValueColumn("Time", "seconds", lambda line: line.timed and time_or_status(line.timed)),
    ValueColumn("Unstable", "text", lambda line: line.timed and line.timed.unstable),
    ValueColumn("Peak memory", "bytes", _peak, help="The largest peak of any rank."),
    ValueColumn("Longest swept", "text", lambda line: describe_end(line.passed, line.failed)),
    ValueColumn("Longest", "text", _longest),
    ValueColumn("Limited by", "text", lambda line: line.longest and line.longest.row.limited_by),
    ValueColumn(
        "Of the floor", "share", lambda line: line.longest and line.longest.row.fraction_of_floor
    ),
)
