"""What `longseq show` shows: the rows of records that were asked for, and how they are printed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from rich.console import Console

from longseq_bench.analysis.fields import fields_of
from longseq_bench.analysis.frames import search_rows_json, sweep_rows_json
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.searches import search_rows
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows_with_records
from longseq_bench.cli.row_filter import (
    OPTION,
    Condition,
    find_field,
    format_value,
    parse_condition,
    parse_sort,
    sort_rows,
)
from longseq_bench.cli.tables import (
    Column,
    Fitted,
    legends,
    maxima_columns,
    sweep_columns,
    time_words,
)
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.document import Axis, Chart, Mark, Point, Section
from longseq_bench.reports.groups import describe_workload, group_by_workload
from longseq_bench.reports.render.sparkline import samples_line
from longseq_bench.reports.render.terminal import print_section
from longseq_bench.reports.render.terminal_text import plain

LABEL, PASSES = "label", "passes"
"""The column of a row's timed passes as a sparkline."""
MOST_PASSES = 24
SWEEP_FIELDS = tuple(fields_of(SweepRow))
SEARCH_FIELDS = (*fields_of(SearchRow), "tokens")
"""A maximum's tokens are its longest, so that one condition on length does for both tables."""
HINT = "a wider terminal, --columns or --json has them"
CHART_HINT = "a wider terminal or --json has them"
_PASSES_SAID = (
    "[dim]passes: the time of every pass in the order they ran, over all rounds; ▁ the fastest, █ "
    "the slowest or 10 % of the median more; of several in one place the slowest[/dim]"
)


@dataclass(frozen=True)
class Part(Generic[R]):
    """Rows of one sort: how many there are, those that match, sorted, and those of them shown.

    lacks: names of fields in conditions that such rows don't have.
    """

    total: int
    matching: Sequence[R]
    shown: Sequence[R]
    lacks: Sequence[str]


@dataclass(frozen=True)
class View:
    """What was asked of records. runs: by id of a row, the records that it is made from.
    columns: (name as written, field); none: those that suit."""

    records: Sequence[Record]
    where: Sequence[str]
    rows: Part[SweepRow]
    maxima: Part[SearchRow]
    runs: Mapping[int, Sequence[Record]]
    columns: Sequence[tuple[str, str]]

    def document(self) -> dict[str, Any]:
        """The rows and maxima that are shown, as the JSON document of a report."""
        return {**sweep_rows_json(self.rows.shown), **search_rows_json(self.maxima.shown)}


def chosen(
    records: Sequence[Record],
    where: Sequence[str],
    sort: Sequence[str],
    columns: Sequence[str],
    limit: int | None,
) -> View:
    """The rows and maxima of records that match every expression, sorted; at most `limit` of each
    are shown.

    Raises UserError for an expression that can't be read, UnknownNameError for a name.
    """
    pairs = sweep_rows_with_records(records)
    rows = [row for row, _ in pairs]
    maxima = search_rows(records)
    every: list[Row] = [*rows, *maxima]
    conditions = [parse_condition(text, every) for text in where]
    keys = [parse_sort(text, every) for text in sort]
    fields = [
        (name, name if name == PASSES else find_field(name, "--columns", every)) for name in columns
    ]
    parts = (
        _part(rows, SWEEP_FIELDS, conditions, keys, limit),
        _part(maxima, SEARCH_FIELDS, conditions, keys, limit),
    )
    runs = {id(row): group for row, group in pairs}
    return View(records, where, *parts, runs, fields)


def _part(
    rows: Sequence[R],
    fields: Sequence[str],
    conditions: Sequence[Condition],
    keys: Sequence[tuple[str, bool]],
    limit: int | None,
) -> Part[R]:
    asked = [c.field for c in conditions if not c.field.startswith(OPTION)]
    lacks = [field for field in dict.fromkeys(asked) if field not in fields]
    kept = [] if lacks else [row for row in rows if all(c.holds(row) for c in conditions)]
    matching = sort_rows(kept, keys)
    return Part(len(rows), matching, matching[:limit], lacks)


def print_view(view: View, screen: Console) -> None:
    """Print what was read, a table a workload with its series below, and maxima in tables of their
    own."""
    for line in _read(view):
        screen.print(plain(line))
    machines = _machines([*view.rows.matching, *view.maxima.matching])
    workloads = {id(row): group for group in group_by_workload(view.rows.matching) for row in group}
    for group in group_by_workload(view.rows.shown):
        _print_heading("", group, machines, screen)
        _print_rows(group, workloads[id(group[0])], view, screen)
    for maxima in group_by_workload(view.maxima.shown):
        _print_heading("Longest lengths: ", maxima, machines, screen)
        named = _named_columns(view, SEARCH_FIELDS)
        columns = maxima_columns(maxima) if named is None else named
        screen.print(Fitted(maxima, columns, HINT))
    for line in _said(view):
        screen.print()
        screen.print(line)


def _said(view: View) -> Iterable[str]:
    """What the columns mean, and how much there would be more."""
    if view.rows.shown and not view.columns:
        yield from legends(view.rows.shown)
    if view.rows.shown and (not view.columns or (PASSES, PASSES) in view.columns):
        yield _PASSES_SAID
    for part, one, many in ((view.rows, "row", "rows"), (view.maxima, "search", "searches")):
        if left := len(part.matching) - len(part.shown):
            yield f"{_counted(left, one, many)} more not shown (--limit)"


def _read(view: View) -> Iterable[str]:
    """What was read and how much of it matches."""
    statuses = Counter(record.outcome.status for record in view.records)
    told = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    yield f"{_counted(len(view.records), 'record')} read: {told}"
    parts = ((view.rows, "row", "rows"), (view.maxima, "search", "searches"))
    for part, one, many in parts:
        if not part.total:
            continue
        there = _counted(part.total, one, many)
        if part.lacks:
            yield f"{there} left out: {many} have no {', '.join(part.lacks)}"
        elif view.where:
            n = len(part.matching)
            some = f"{n:,} match" if n > 1 else f"{n or 'none'} matches"
            yield f"{there}, of which {some} {' and '.join(view.where)}"
        else:
            yield there
    if steps := sum(record.purpose == "density" for record in view.records):
        yield f"{_counted(steps, 'record')} of searches for the least sparsity: longseq report"


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _machines(rows: Iterable[Row]) -> dict[str, str]:
    """What each machine is called where there are several, else nothing."""
    hosts = {row.fingerprint: row.host for row in rows}
    if len(hosts) == 1:
        return dict.fromkeys(hosts, "")
    return {fingerprint: f"{host} {fingerprint[:6]}" for fingerprint, host in hosts.items()}


def _print_heading(
    before: str, group: Sequence[Row], machines: Mapping[str, str], screen: Console
) -> None:
    screen.print()
    screen.print(plain(before + describe_workload(group[0], machines), "bold"))


def _print_rows(
    group: Sequence[SweepRow], matching: Sequence[SweepRow], view: View, screen: Console
) -> None:
    named = _named_columns(view, (*SWEEP_FIELDS, PASSES))
    columns = _with_passes(group, view) if named is None else named
    screen.print(Fitted(group, columns, HINT))
    for line in _failures(group):
        screen.print(plain(line, "yellow"))
    if chart := _times(group, matching):
        screen.print()
        print_section(Section("", charts=[chart]), screen, CHART_HINT)


def _with_passes(group: Sequence[SweepRow], view: View) -> list[Column]:
    columns = sweep_columns(group)
    at = [column.heading for column in columns].index("±") + 1
    return [*columns[:at], _passes(view), *columns[at:]]


def _passes(view: View, leaves: int = 3) -> Column:
    def cell(row: SweepRow) -> str:
        if _failed(row):
            return ""
        runs = sorted(view.runs[id(row)], key=lambda run: (run.started_at, run.trial.round))
        return samples_line([s for run in runs for s in per_iteration(run, "time")], MOST_PASSES)

    return Column(PASSES, cell, leaves, justify="left")


def _named_columns(view: View, fields: Sequence[str]) -> list[Column] | None:
    """The columns that were asked for, of those that such rows have; the last leaves first. Of
    labels none, which stand before every row; None where nothing was asked that such rows have."""
    named = [(n, f) for n, f in view.columns if f in fields or f.startswith(OPTION)]
    rest = [(name, field) for name, field in named if field != LABEL]
    columns = [_named(name, field, len(rest) - i, view) for i, (name, field) in enumerate(rest)]
    return columns if named else None


def _named(name: str, field: str, leaves: int, view: View) -> Column:
    if field == PASSES:
        return _passes(view, leaves)
    if field == "time_s":
        return Column(name, lambda row: time_words(row)[0], leaves)
    return Column(name, lambda row: plain(format_value(row, field)), leaves)


def _failures(group: Sequence[SweepRow]) -> Iterable[str]:
    """Each reason once, with the rows it is of."""
    of: dict[str, list[SweepRow]] = defaultdict(list)
    for row in group:
        if _failed(row):
            where = f" in {row.phase}" if row.phase else ""
            of[f"{row.status}{where}: {row.reason}"].append(row)
    for said, rows in of.items():
        more = f" and {_counted(len(rows) - 1, 'more row')}" if len(rows) > 1 else ""
        yield f"{rows[0].name} at {format_tokens(rows[0].tokens)}{more}: {said}"


def _times(group: Sequence[SweepRow], matching: Sequence[SweepRow]) -> Chart | None:
    """Time over length of the series that are shown, of all that match; None for one length."""
    shown = {row.name for row in group}
    rows = [(name, row) for row in matching if (name := row.name) in shown]
    if len({row.tokens for _, row in rows}) < 2:
        return None
    points = [Point(name, row.tokens, row.time_s) for name, row in rows if row.time_s]
    marks = [Mark(name, row.tokens, row.status) for name, row in rows if _failed(row)]
    axes = Axis("tokens", "tokens", log=True), Axis("time", "seconds", log=True)
    made = Chart("time", "Time over length", "", *axes, tuple(points), tuple(marks))
    return made if points else None


def _failed(row: SweepRow) -> bool:
    return bool(row.status != "ok")
