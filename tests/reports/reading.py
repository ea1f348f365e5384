"""Readers of documents for tests: sections, rows of tables by heading, sentences."""

from collections.abc import Sequence
from typing import Any

from longseq_bench.core.model import Record
from longseq_bench.reports.document import Document, Section, Table, format_cell
from longseq_bench.reports.kinds import documents


def build(records: Sequence[Record], kind: str = "summary", **given: Any) -> Document:
    (document,) = documents(records, [kind], **given)
    return document


def section(document: Document, title: str) -> Section:
    """The only section with this title."""
    (found,) = [s for s in document.sections if s.title == title]
    return found


def titles(document: Document) -> list[str]:
    return [s.title for s in document.sections]


def cells(table: Table) -> list[dict[str, Any]]:
    """Rows by heading; a repeated heading gets the suffix " (2)"."""
    names: list[str] = []
    for column in table.columns:
        names.append(f"{column.name} (2)" if column.name in names else column.name)
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def rows(document: Document, title: str) -> list[dict[str, Any]]:
    """The rows of every table of a section, as values."""
    return [row for table in section(document, title).tables for row in cells(table)]


def texts(document: Document, title: str) -> list[dict[str, str]]:
    """The same rows, formatted as text."""
    return [
        dict(zip(row, (format_cell(v, c.kind) for v, c in pairs), strict=True))
        for table in section(document, title).tables
        for row in cells(table)
        for pairs in [zip(row.values(), table.columns, strict=True)]
    ]


def words(document: Document) -> str:
    lines = [*document.paragraphs]
    for one in document.sections:
        lines += [one.title, *one.paragraphs, *one.points, *one.code]
    return "\n".join(lines)
