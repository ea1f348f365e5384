"""The answer of a run as HTML without scripts, for the output of a notebook's cell."""

from collections.abc import Iterator
from html import escape

from longseq_bench.reports.document import Document, Table, format_cell


def fragment(document: Document) -> str:
    """Return sentences and tables of a document as HTML. Columns without a value are left out."""
    lines = [f"<p>{escape(paragraph)}</p>" for paragraph in document.paragraphs]
    for section in document.sections:
        lines += ["".join(_table(table)) for table in section.tables]
        lines += [f"<p>{escape(text)}</p>" for text in [*section.paragraphs, *section.points]]
    return "\n".join(lines)


def _table(table: Table) -> Iterator[str]:
    columns = list(enumerate(table.columns))
    filled = [(i, c) for i, c in columns if any(row[i] is not None for row in table.rows)]
    yield f"<table><caption>{escape(table.title)}</caption><thead><tr>"
    yield from (f"<th>{escape(column.name)}</th>" for _, column in filled)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>"
        for i, column in filled:
            align = "left" if column.kind == "text" else "right"
            text = escape(format_cell(row[i], column.kind))
            yield f'<td style="text-align: {align}">{text}</td>'
        yield "</tr>"
    yield "</tbody></table>"
