"""The document of `longseq show`: rows that match, in the columns that are asked for."""

from collections import Counter
from collections.abc import Sequence

from longseq_bench.analysis.row import R, Row, fields_of
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.api.progress import format_option
from longseq_bench.api.results import Results
from longseq_bench.cli.row_filter import FIELDS, OPTION, find_field, value_of
from longseq_bench.reports.columns import (
    SEARCH_FIELDS,
    SWEEP_FIELDS,
    Columns,
    ValueColumn,
    terminal_columns,
    time_or_status,
)
from longseq_bench.reports.document import Cell, Document, Section, Table
from longseq_bench.reports.groups import describe_rows


def show_document(
    results: Results,
    rows: list[SweepRow],
    searches: list[SearchRow],
    where: Sequence[str],
    columns: Sequence[str],
    limit: int | None,
) -> Document:
    """Return the document: records read, a table per workload, failures, explanations.

    rows, searches: those that match the conditions, of which at most `limit` each are shown.
    columns: fields to show; empty: those that suit the rows.
    """
    records, source = results.records, results.source
    known = [*results.rows, *results.maxima]
    named = [(name, find_field(name, "--columns", known)) for name in columns]

    def build(some: Sequence[Row], row_type: type, default: Sequence[str]) -> list[Table]:
        return source.tables(some, _columns(row_type, default, named), keep_empty=bool(columns))

    shown, maxima = rows[:limit], searches[:limit]
    sections = [
        Section("", tables=build(shown, SweepRow, SWEEP_FIELDS)),
        Section("", points=describe_rows(shown)),
        Section("Longest lengths", tables=build(maxima, SearchRow, SEARCH_FIELDS)),
    ]
    statuses = Counter(record.outcome.status for record in records)
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    read = [f"{_count(len(records), 'record')} read: {counts}"]
    read += _describe(results.rows, rows, limit, "row", where)
    read += _describe(results.maxima, searches, limit, "search", where)
    paragraphs = [". ".join(read) + ".", *filter(None, [source.context])]
    return Document("show", "", paragraphs, [one for one in sections if one.has_content])


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
    chosen = {
        name: column(name, field)
        for name, field in named
        if field in known or field.startswith(OPTION)
    }
    # the label is the first column of every table anyway
    names = [name for name in chosen if name != "label"] if chosen else default
    return terminal_columns(row_type, names, chosen)


def _describe(
    every: Sequence[R], matching: Sequence[R], limit: int | None, noun: str, where: Sequence[str]
) -> list[str]:
    if not every:
        return []
    words = _count(len(every), noun)
    if where:
        verb = "match" if len(matching) > 1 else "matches"
        words += f", of which {len(matching) or 'none'} {verb} {' and '.join(where)}"
    hidden = len(matching[limit:]) if limit else 0
    return [words, *([f"{_count(hidden, noun)} more not shown (--limit)"] if hidden else [])]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun == 'search' else 's'}"
