"""The answer of a run as HTML without scripts, for the output of a notebook's cell."""

from collections.abc import Iterator
from html import escape

from longseq_bench.reports.document import Document, Table, format_cell


def fragment(document: Document) -> str:
    """Return sentences and tables of a document as HTML. Columns without a value are left out."""
    return "\n".join(_parts(document))


def _parts(document: Document) -> Iterator[str]:
    for paragraph in document.paragraphs:
        yield f"<p>{escape(paragraph)}</p>"
    for section in document.sections:
        for table in section.tables:
            yield _table(table)
        for sentence in [*section.paragraphs, *section.points]:
            yield f"<p>{escape(sentence)}</p>"


def _table(table: Table) -> str:
    kept = [i for i, _ in enumerate(table.columns) if any(row[i] is not None for row in table.rows)]
    headings = "".join(f"<th>{escape(table.columns[i].name)}</th>" for i in kept)
    rows = "".join(
        "<tr>" + "".join(_cell(table, i, row[i]) for i in kept) + "</tr>" for row in table.rows
    )
    title = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return f"<table>{title}<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(table: Table, i: int, value: object) -> str:
    text = format_cell(value, table.columns[i].kind)  # type: ignore[arg-type]
    align = "left" if table.columns[i].kind == "text" else "right"
    return f'<td style="text-align: {align}">{escape(text)}</td>'
