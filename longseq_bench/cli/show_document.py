"""Select the rows that `longseq show` prints, and build their document."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from longseq_bench.analysis.fields import fields_of
from longseq_bench.analysis.labels import set_labels
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.searches import search_rows
from longseq_bench.analysis.short_labels import index_short_labels
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.api.trial_text import format_option
from longseq_bench.cli.row_filter import (
    FIELDS,
    OPTION,
    filter_rows,
    find_field,
    value_of,
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
from longseq_bench.reports.document import Cell, Document, Section, Table
from longseq_bench.reports.groups import (
    capitalize_first,
    describe_shared,
    describe_workload,
    find_varying,
    group_by_workload,
)
from longseq_bench.reports.outcome_text import describe_failures, describe_unstable


@dataclass(frozen=True)
class Selection(Generic[R]):
    """Rows of one class: all, those that match in order, and the first of them to show."""

    every: Sequence[R]
    matching: Sequence[R]
    shown: Sequence[R]


def select_rows(
    records: Sequence[Record], where: Sequence[str], sort: Sequence[str], limit: int | None
) -> tuple[Selection[SweepRow], Selection[SearchRow]]:
    """Select the rows that match every condition, sorted; at most `limit` of each class to show.

    Raises UserError for a condition that can't be read, UnknownNameError for an unknown name.
    """
    rows, searches = sweep_rows(records), search_rows(records)
    labels = index_short_labels([*rows, *searches])
    rows, searches = set_labels(rows, labels), set_labels(searches, labels)

    def select(some: list[R]) -> Selection[R]:
        matching = filter_rows(some, [*rows, *searches], where, sort)
        return Selection(some, matching, matching[:limit])

    return select(rows), select(searches)


def show_document(
    records: Sequence[Record], where: Sequence[str], columns: Sequence[str],
    rows: Selection[SweepRow], searches: Selection[SearchRow],
) -> Document:  # fmt: skip
    """Return the document: records read, a table per workload, failures, explanations.

    columns: fields to show; empty: those that suit the rows.
    """
    every: list[Row] = [*rows.matching, *searches.matching]
    known: list[Row] = [*rows.every, *searches.every]
    named = [(name, find_field(name, "--columns", known)) for name in columns]
    hosts = {row.fingerprint: row.host for row in every}
    machines = {key: f"{host} {key[:6]}" if len(hosts) > 1 else "" for key, host in hosts.items()}
    varying = find_varying(every)

    def table(group: Sequence[Row], default: Sequence[str]) -> Table:
        title = capitalize_first(describe_workload(group[0], machines, varying))
        return build_table(title, _columns(type(group[0]), default, named), group, bool(columns))

    sections = []
    for group in group_by_workload(rows.shown):
        sections.append(Section("", tables=[table(group, SWEEP_FIELDS)]))
        sections.append(Section("", points=[*describe_failures(group), *describe_unstable(group)]))
    tables = [table(group, SEARCH_FIELDS) for group in group_by_workload(searches.shown)]
    swept = [one for section in sections for one in section.tables]
    notes = [*explain(SweepRow, swept), *explain(SearchRow, tables)]
    sections += [Section("Longest lengths", tables=tables), Section("", points=notes)]
    statuses = Counter(record.outcome.status for record in records)
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    read = [f"{_count(len(records), 'record')} read: {counts}"]
    read += [
        *_describe(rows, "row", "rows", where),
        *_describe(searches, "search", "searches", where),
    ]
    if steps := sum(record.purpose == "density" for record in records):
        found = _count(steps, "record")
        read.append(f"{found} of searches for the minimum sparsity: longseq report")
    shared = [describe_shared(every, machines, varying)] if every else []
    shown = [section for section in sections if section.has_content]
    return Document("show", "", [". ".join(read) + ".", *shared], shown)


def _columns(row_type: type, default: Sequence[str], named: Sequence[tuple[str, str]]) -> Columns:
    """Return the requested columns that such rows have; the default without such columns."""

    def column(name: str, field: str) -> ValueColumn:
        if field == "time_s":
            return ValueColumn(name, "seconds", time_or_status)
        kind = FIELDS[field].kind if field in FIELDS else "text"

        def value(row: Row) -> Cell:
            found = value_of(row, field)
            if kind == "flag" and found is not None:
                return "yes" if found else "no"
            return format_option(found) if kind == "text" and found is not None else found

        return ValueColumn(name, kind, value)

    known = {*fields_of(row_type), "tokens"}
    # the label is the first column of every table anyway
    found = {n: column(n, f) for n, f in named if f in known or f.startswith(OPTION)}
    chosen = {name: one for name, one in found.items() if name != "label"}
    return terminal_columns(row_type, list(chosen) if found else default, chosen)


def _describe(part: Selection[R], singular: str, plural: str, where: Sequence[str]) -> list[str]:
    """Return the number of rows, and how many of them match and are shown."""
    total, matching = _count(len(part.every), singular, plural), len(part.matching)
    if not part.every:
        return []
    words = ""
    if where:
        verb = "match" if matching > 1 else "matches"
        words = f", of which {matching or 'none'} {verb} {' and '.join(where)}"
    hidden = matching - len(part.shown)
    more = [f"{_count(hidden, singular, plural)} more not shown (--limit)"] if hidden else []
    return [total + words, *more]


def _count(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
