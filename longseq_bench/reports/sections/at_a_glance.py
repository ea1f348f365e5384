"""One line per implementation: its time at one length, and the longest length that it reached."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeVar

from longseq_bench.analysis.labels import MAX_LABEL
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports import charts, maxima_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_or_status
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Cell, Chart, Section, Table
from longseq_bench.reports.groups import common_length, in_brackets, most_shared
from longseq_bench.reports.outcome_text import name_status

K = TypeVar("K", bound=Hashable)
ALL = "All implementations"


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

    at: rows of the workload that most implementations share, at the length that most share.
    searched: searches of the workload that most implementations share.
    noun: what a line is of.
    """

    noun: str
    at: list[SweepRow]
    searched: list[SearchRow]
    lines: list[Glance]
    chart: Chart | None

    def table(self, source: Source) -> Table | None:
        """Return a table of the lines; None if no line has more than a name.

        Exact and sparse attention are in one table, so the share of the pairs has a column.
        """
        is_swept = any(line.passed and not line.longest for line in self.lines)
        columns = [one for one in _COLUMNS if one.heading != "Longest swept" or is_swept]
        title = f"One line per {self.noun}"
        if self.at:
            tokens = format_tokens(self.at[0].tokens)
            title += f"; time and peak memory at {tokens} tokens{source.where(self.at[0])}"
        if self.searched and (where := source.workload(self.searched[0])):
            title += f"; longest: {where}"
        table = build_table(title, columns, self.lines)
        return table if len(table.columns) > 1 else None


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
    lines.sort(key=_order)
    return Overview(noun, at, searched, lines, _chart(swept, at, lines))


def _chart(
    swept: Sequence[SweepRow], at: Sequence[SweepRow], lines: Sequence[Glance]
) -> Chart | None:
    """Draw the times of the first lines; else their longest lengths; else the peaks."""
    first = lines[:MAX_ANSWER_ROWS]
    if chart := charts.time_of_best(swept, [line.timed for line in first if line.timed]):
        return chart
    longest = (line.longest for line in first if line.longest)
    named = {f"{one.row.name}{in_brackets(one.where)}": one.row for one in longest}
    short = {name: row for name, row in named.items() if len(name) <= MAX_LABEL}
    return maxima_charts.longest_bars(short) or charts.memory(at, "")


def all_implementations(source: Source) -> Section:
    """Build the table of all lines: the fastest and the longest variant of each implementation."""
    found = overview(source)
    table, chart = found.table(source), found.chart
    drawn = [chart] if table and chart else []
    return Section(ALL, tables=[table] if table else [], charts=drawn)


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
