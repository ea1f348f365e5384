"""Documents that commands print when they end: the answer, without the rest of a report."""

from collections.abc import Sequence
from dataclasses import replace

from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Record
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import SEARCH_FIELDS, SWEEP_FIELDS, ValueColumn, terminal_columns
from longseq_bench.reports.document import Document, Section
from longseq_bench.reports.groups import describe_rows
from longseq_bench.reports.sections.by_length import answer_figures, by_length
from longseq_bench.reports.sections.failures import describe_search, index_one_rank
from longseq_bench.reports.sections.growth import exponents, over_ranks


def answer_brief(records: Sequence[Record]) -> Document | None:
    """Return the answer by length; None for records that were not asked with lengths."""
    source = Source(records)
    figures = tuple(answer_figures(source))
    if not figures:
        return None
    points = Section("", points=describe_rows(source.rows))
    answer = replace(by_length(source), title="")
    return replace(_document("recommend", source, answer, points), figures=figures)


def sweep_brief(records: Sequence[Record], baseline: str | None = None) -> Document:
    """Return a table per workload of swept rows, and their failures."""
    source = Source(records, baseline)
    return _document("sweep", source, *_sweep_sections(source))


def _sweep_sections(source: Source) -> list[Section]:
    speed = ValueColumn(f"× {source.baseline_label}", "ratio", lambda row: row.speed)
    columns = terminal_columns(SweepRow, SWEEP_FIELDS, {"speed": speed})
    tables = source.tables(source.rows, columns)
    return [Section("", tables=tables), Section("", points=describe_rows(source.rows))]


def search_brief(records: Sequence[Record]) -> Document:
    """Return a table per workload of searches for the longest length, and a sentence each."""
    source = Source(records)
    columns = terminal_columns(SearchRow, SEARCH_FIELDS)
    tables = source.tables(source.maxima, columns)
    one_rank = index_one_rank(source.maxima)
    answers = Section("", points=[describe_search(row, one_rank) for row in source.maxima])
    return _document("maxlen", source, Section("", tables=tables), answers)


def scaling_brief(records: Sequence[Record]) -> Document:
    """Return the swept rows, then maxima against theory, then the fitted exponents."""
    source = Source(records)
    fits = (replace(one, title="", charts=()) for one in (over_ranks(source), exponents(source)))
    return _document("scaling", source, *_sweep_sections(source), *fits)


def _document(kind: str, source: Source, *sections: Section) -> Document:
    context = [source.context] if source.context else []
    return Document(kind, "", context, [one.limited() for one in sections if one.has_content])
