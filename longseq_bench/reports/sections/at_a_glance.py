"""One line per implementation: its time at one length, and the longest length that it reached."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import R, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_with_interval
from longseq_bench.reports.document import Cell, Section
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.outcome_text import name_status


class Glance(NamedTuple):
    """The line of an implementation; its fastest and its longest variant may differ.

    timed: its fastest row that was ok at the common length.  failed: a row that failed there.
    where: the workload of `longest` in brackets, if it is not that of the other lines.
    """

    implementation: str
    timed: SweepRow | None
    failed: SweepRow | None
    longest: SearchRow | None
    where: str


def at_a_glance(source: Source) -> Section:
    """Build the table: every implementation of the records, the fastest first.

    Times are of one workload and one length: those that most implementations share. Longest lengths
    are of one workload too; an implementation without it has its own, which is named. Exact and
    sparse attention are in one table, so the share of the pairs that are seen has a column.
    """
    at = _common_length(_most_shared([row for row in source.rows if row.is_full_pass]))
    found = [row for row in source.maxima if row.is_full_pass and row.max_tokens]
    if not at and not found:
        return Section("At a glance")
    searched = _most_shared(found)
    timed = _best([row for row in at if row.is_ok and row.time_s], lambda row: require(row.time_s))
    failed = {row.implementation: row for row in at if not row.is_ok}
    shared, own = (_best(rows, lambda row: -row.max_tokens) for rows in (searched, found))
    lines = []
    for name in dict.fromkeys(record.trial.implementation for record in source.records):
        row = shared.get(name) or own.get(name)
        where = source.where(row) if row and name not in shared else ""
        lines.append(Glance(name, timed.get(name), failed.get(name), row, where))
    lines.sort(key=_order)
    table = build_table("One line per implementation", _COLUMNS, lines)
    return Section("At a glance", list(_explain(source, at, searched)), tables=[table])


def _explain(source: Source, at: list[SweepRow], searched: list[SearchRow]) -> Iterator[str]:
    """State the workload of each column, and the choice among variants."""
    if at:
        where = source.where(at[0])
        yield f"Time and peak memory: at {format_tokens(at[0].tokens)} tokens{where}."
    if searched and (workload := source.workload(searched[0])):
        yield f"Longest: {workload}, unless a line names another."
    every = [*at, *searched]
    if len({row.name for row in every}) > len({row.implementation for row in every}):
        yield "A line has the fastest and the longest variant of an implementation."


def _most_shared(rows: Sequence[R]) -> list[R]:
    """Return the rows of the workload that most implementations have; the first of equal ones."""
    groups = group_by_workload(rows)
    return max(groups, key=lambda group: len({row.implementation for row in group}), default=[])


def _common_length(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the rows of the length at which most implementations were ok; the longest of equal."""
    by_length = group_by(rows, attrgetter("tokens"))

    def rank(tokens: int) -> tuple[int, int]:
        return len({row.implementation for row in by_length[tokens] if row.is_ok}), tokens

    return by_length[max(by_length, key=rank)] if by_length else []


def _best(rows: Sequence[R], cost: Callable[[R], float]) -> dict[str, R]:
    """Return the row of the lowest cost of each implementation."""
    groups = group_by(rows, attrgetter("implementation"))
    return {name: min(group, key=cost) for name, group in groups.items()}


def _order(line: Glance) -> tuple[bool, float, float]:
    """Order by time, then by length; implementations without a time come last."""
    time = line.timed.time_s if line.timed else None
    return time is None, time or 0.0, -(line.longest.max_tokens if line.longest else 0)


def _name(line: Glance) -> str:
    best = line.timed or line.longest
    return best.name if best else line.implementation


def _density(line: Glance) -> float | None:
    return line.timed.token_density if line.timed and line.timed.is_sparse else None


def _time(line: Glance) -> Cell:
    if line.timed:
        return time_with_interval(line.timed)
    return name_status(line.failed.status) if line.failed else None


def _longest(line: Glance) -> Cell:
    row = line.longest
    if row is None:
        return None
    variant = "" if line.timed is None or line.timed.label == row.label else f" ({row.name})"
    return f"{row.max_tokens:,}{variant}{line.where}"


_COLUMNS = (
    ValueColumn("Implementation", "text", _name),
    ValueColumn("Pairs seen", "share", _density),
    ValueColumn("Time", "seconds", _time),
    ValueColumn("Peak memory", "bytes", lambda line: line.timed and line.timed.peak_bytes),
    ValueColumn("Longest", "text", _longest),
    ValueColumn("Limited by", "text", lambda line: line.longest and line.longest.limited_by),
)
