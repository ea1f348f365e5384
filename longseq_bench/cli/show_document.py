"""Select the rows that `longseq show` prints, and build their document."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from longseq_bench.analysis.fields import fields_of
from longseq_bench.analysis.labels import set_labels
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.searches import search_rows
from longseq_bench.analysis.short_labels import index_short_labels
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows_with_records
from longseq_bench.cli.row_filter import (
    FIELDS,
    OPTION,
    Condition,
    find_field,
    format_value,
    parse_condition,
    parse_sort,
    sort_rows,
)
from longseq_bench.core.model import Record
from longseq_bench.reports.columns import (
    SEARCH_FIELDS,
    SWEEP_FIELDS,
    Columns,
    ValueColumn,
    build_table,
    explain,
    terminal_columns,
    time_or_status,
)
from longseq_bench.reports.document import Axis, Chart, Document, Mark, Point, Section, Table
from longseq_bench.reports.groups import (
    capitalize_first,
    describe_shared,
    describe_workload,
    find_varying,
    group_by_workload,
)
from longseq_bench.reports.outcome_text import (
    describe_failures,
    describe_unstable,
    name_status,
)
from longseq_bench.reports.render.sparkline import samples_line

PASSES = "passes"  # the name of the column with a sparkline of a row's timed passes
MAX_PASSES = 24
_PASSES_EXPLANATION = (
    "Passes: the time of every pass in the order they ran, over all rounds; ▁ the fastest, █ the "
    "slowest or 10 % above the median; a character for several passes shows the slowest."
)


@dataclass(frozen=True)
class RowSelection(Generic[R]):
    """Rows of one class: their number, the matching rows in order, and the first of them to show.

    missing: fields in conditions that such rows don't have.
    """

    total: int
    matching: Sequence[R]
    shown: Sequence[R]
    missing: Sequence[str]


@dataclass(frozen=True)
class Selection:
    """Rows and searches that match; runs: the records of a row, by the row's id.

    columns: (name as written, field) of the columns to show; empty: those that suit the rows.
    """

    records: Sequence[Record]
    where: Sequence[str]
    rows: RowSelection[SweepRow]
    searches: RowSelection[SearchRow]
    runs: Mapping[int, Sequence[Record]]
    columns: Sequence[tuple[str, str]]


def select_rows(
    records: Sequence[Record], where: Sequence[str], sort: Sequence[str], columns: Sequence[str],
    limit: int | None,
) -> Selection:  # fmt: skip
    """Select the rows that match every condition, sorted; at most `limit` of each class to show.

    Raises UserError for a condition that can't be read, UnknownNameError for an unknown name.
    """
    pairs = sweep_rows_with_records(records)
    rows, searches = [row for row, _ in pairs], search_rows(records)
    every: list[Row] = [*rows, *searches]
    labels = index_short_labels(every)
    short_rows, short_searches = set_labels(rows, labels), set_labels(searches, labels)
    conditions = [parse_condition(text, every) for text in where]
    keys = [parse_sort(text, every) for text in sort]
    fields = [
        (name, name if name == PASSES else find_field(name, "--columns", every)) for name in columns
    ]
    return Selection(
        records,
        where,
        _select(rows, short_rows, conditions, keys, limit),
        _select(searches, short_searches, conditions, keys, limit),
        {id(row): runs for row, (_, runs) in zip(short_rows, pairs, strict=True)},
        fields,
    )


def _select(
    rows: Sequence[R], short: Sequence[R], conditions: Sequence[Condition],
    keys: Sequence[tuple[str, bool]], limit: int | None,
) -> RowSelection[R]:  # fmt: skip
    """Select rows by both of their labels.  short: the same rows with short labels, to show."""
    used = dict.fromkeys(c.field for c in conditions if not c.field.startswith(OPTION))
    missing = [field for field in used if rows and not hasattr(rows[0], field)]
    both = [] if missing else zip(rows, short, strict=True)
    passing = [shown for row, shown in both if all(c.holds(row, shown) for c in conditions)]
    matching = sort_rows(passing, keys)
    return RowSelection(len(rows), matching, matching[:limit], missing)


def show_document(chosen: Selection) -> Document:
    """Return the document: records read, a table per workload, failures, charts, explanations."""
    every: list[Row] = [*chosen.rows.matching, *chosen.searches.matching]
    machines, varying = _name_machines(every), find_varying(every)

    def table(rows: Sequence[Row], columns: Columns) -> Table:
        title = capitalize_first(describe_workload(rows[0], machines, varying))
        return build_table(title, columns, rows, has_columns)

    workloads = {
        id(row): group for group in group_by_workload(chosen.rows.matching) for row in group
    }
    has_columns = bool(chosen.columns)
    columns = _columns(chosen, SweepRow, (*SWEEP_FIELDS[:10], PASSES, *SWEEP_FIELDS[10:]))
    sweep_sections: list[Section] = []
    for rows in group_by_workload(chosen.rows.shown):
        sweep_sections += [
            Section("", tables=[table(rows, columns)]),
            Section("", points=[*describe_failures(rows), *describe_unstable(rows)]),
            Section("", charts=_time_chart(rows, workloads[id(rows[0])])),
        ]
    columns = _columns(chosen, SearchRow, SEARCH_FIELDS)
    search_tables = [table(rows, columns) for rows in group_by_workload(chosen.searches.shown)]
    tables = [table for section in sweep_sections for table in section.tables]
    shared = [describe_shared(every, machines, varying)] if every else []
    notes = [*explain(SweepRow, tables), *explain(SearchRow, search_tables)]
    if any(column.name == "Passes" for table in tables for column in table.columns):
        notes.append(_PASSES_EXPLANATION)
    searches = Section("Longest lengths", tables=search_tables)
    sections = [*sweep_sections, searches, Section("", points=notes)]
    return Document(
        "show",
        "",
        [". ".join(_describe_records(chosen)) + ".", *shared],
        [section for section in sections if section.has_content],
    )


def _columns(chosen: Selection, row_type: type, default: Sequence[str]) -> Columns:
    """Return the requested columns that such rows have; the default without such columns."""
    passes = ValueColumn("Passes", "text", lambda row: _passes(chosen, row))
    known = (*fields_of(row_type), *([PASSES] if row_type is SweepRow else ["tokens"]))
    requested = [(n, f) for n, f in chosen.columns if f in known or f.startswith(OPTION)]
    if not requested:
        return terminal_columns(row_type, default, {PASSES: passes})
    # the label is the first column of every table anyway
    columns = {
        name: replace(passes, heading=name) if field == PASSES else _named_column(name, field)
        for name, field in requested if field != "label"
    }  # fmt: skip
    return terminal_columns(row_type, list(columns), columns)


def _named_column(name: str, field: str) -> ValueColumn:
    if field == "time_s":
        return ValueColumn(name, "seconds", time_or_status)
    kind = FIELDS[field].kind if field in FIELDS else "text"
    return ValueColumn(name, kind, lambda row: format_value(row, field))


def _passes(chosen: Selection, row: SweepRow) -> str | None:
    runs = sorted(chosen.runs[id(row)], key=lambda run: (run.started_at, run.trial.round))
    samples = [s for run in runs for s in per_iteration(run, "time")] if row.is_ok else []
    return samples_line(samples, MAX_PASSES) or None


def _describe_records(chosen: Selection) -> Iterator[str]:
    """Yield the number of records that were read, and the number of rows that match."""
    statuses = Counter(record.outcome.status for record in chosen.records)
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    yield f"{_count(len(chosen.records), 'record')} read: {counts}"
    selections = ((chosen.rows, "row", "rows"), (chosen.searches, "search", "searches"))
    for part, singular, plural in selections:
        if not part.total:
            continue
        total = _count(part.total, singular, plural)
        if part.missing:
            yield f"{total} left out: {plural} have no {', '.join(part.missing)}"
        elif chosen.where:
            n = len(part.matching)
            verb = "match" if n > 1 else "matches"
            yield f"{total}, of which {n or 'none'} {verb} {' and '.join(chosen.where)}"
        else:
            yield total
        if hidden := len(part.matching) - len(part.shown):
            yield f"{_count(hidden, singular, plural)} more not shown (--limit)"
    if steps := sum(record.purpose == "density" for record in chosen.records):
        yield f"{_count(steps, 'record')} of searches for the minimum sparsity: longseq report"


def _count(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def _name_machines(rows: Iterable[Row]) -> dict[str, str]:
    """Return a name for each fingerprint; "" if there is only one."""
    hosts = {row.fingerprint: row.host for row in rows}
    if len(hosts) == 1:
        return dict.fromkeys(hosts, "")
    return {fingerprint: f"{host} {fingerprint[:6]}" for fingerprint, host in hosts.items()}


def _time_chart(group: Sequence[SweepRow], matching: Sequence[SweepRow]) -> list[Chart]:
    """Return a chart of time over length for the series of a group; none for a single length.

    matching: all rows of the workload, so that a series is complete although --limit hides rows.
    """
    names = {row.name for row in group}
    rows = [row for row in matching if row.name in names and row.status != "unsupported"]
    points = tuple(Point(row.name, row.tokens, row.time_s) for row in rows if row.time_s)
    if len({row.tokens for row in rows}) < 2 or not points:
        return []
    marks = tuple(
        Mark(row.name, row.tokens, name_status(row.status)) for row in rows if not row.is_ok
    )
    axes = Axis("tokens", "tokens", log=True), Axis("time", "seconds", log=True)
    return [Chart("time", "Time over length", "", *axes, points, marks)]
