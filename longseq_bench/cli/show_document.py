"""The document of `longseq show`: rows that match, in the columns that are asked for."""

from collections import Counter
from collections.abc import Sequence

from longseq_bench.analysis.row import R, Row, fields_of
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.api.progress import format_option
from longseq_bench.api.results import Results
from longseq_bench.cli.row_filter import FIELDS, OPTION, find_field, value_of
from longseq_bench.reports import columns as tables
from longseq_bench.reports import groups
from longseq_bench.reports.document import Cell, Document, Section, Table
from longseq_bench.reports.groups import describe_failures, describe_unstable


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
    records, every = results.records, [*rows, *searches]
    known = [*results.rows, *results.maxima]
    named = [(name, find_field(name, "--columns", known)) for name in columns]
    hosts = {row.fingerprint: row.host for row in every}
    machines = {key: f"{host} {key[:6]}" if len(hosts) > 1 else "" for key, host in hosts.items()}
    varying = groups.find_varying(every)

    def table(group: Sequence[Row], default: Sequence[str]) -> Table:
        title = groups.capitalize_first(groups.describe_workload(group[0], machines, varying))
        chosen = _columns(type(group[0]), default, named)
        return tables.build_table(title, chosen, group, bool(columns))

    sections = []
    for group in groups.group_by_workload(rows[:limit]):
        sections.append(Section("", tables=[table(group, tables.SWEEP_FIELDS)]))
        sections.append(Section("", points=[*describe_failures(group), *describe_unstable(group)]))
    found = [table(g, tables.SEARCH_FIELDS) for g in groups.group_by_workload(searches[:limit])]
    sections.append(Section("Longest lengths", tables=found))
    statuses = Counter(record.outcome.status for record in records)
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    read = [f"{_count(len(records), 'record')} read: {counts}"]
    read += _describe(results.rows, rows, limit, "row", where)
    read += _describe(results.maxima, searches, limit, "search", where)
    shared = [groups.describe_shared(every[0], machines, varying)] if every else []
    shown = [section for section in sections if section.has_content]
    return Document("show", "", [". ".join(read) + ".", *shared], shown)


def _columns(
    row_type: type, default: Sequence[str], named: Sequence[tuple[str, str]]
) -> tables.Columns:
    """Return the requested columns that such rows have; the default without such columns."""

    def column(name: str, field: str) -> tables.ValueColumn:
        if field == "time_s":
            return tables.ValueColumn(name, "seconds", tables.time_or_status)
        kind = FIELDS[field].kind if field in FIELDS else "text"

        def value(row: Row) -> Cell:
            found = value_of(row, field)
            if kind == "flag" and found is not None:
                return "yes" if found else "no"
            return format_option(found) if kind == "text" and found is not None else found

        return tables.ValueColumn(name, kind, value)

    known = {*fields_of(row_type), "tokens"}
    chosen = {
        name: column(name, field)
        for name, field in named
        if field in known or field.startswith(OPTION)
    }
    # the label is the first column of every table anyway
    names = [name for name in chosen if name != "label"] if chosen else default
    return tables.terminal_columns(row_type, names, chosen)


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
