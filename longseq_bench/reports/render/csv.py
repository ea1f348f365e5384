"""Documents as CSV (RFC 4180): raw values, SI units, empty where unknown.

The main file is the tidy data, one row per measurement. Each table has a file of its own.
"""

import csv
import io
import re

from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Cell, Document, Spread, Table

LONGEST_NAME = 60


@FORMATS.register("csv")
def render(document: Document) -> Files:
    """`<stem>.csv`, and `<stem>-tables/NN-title.csv` for each table."""
    files = {f"{document.stem}.csv": _written(document.data)}
    tables = [(section.title, t) for section in document.sections for t in section.tables]
    for i, (title, table) in enumerate(tables, 1):
        name = slug(f"{title} {table.title}")
        files[f"{document.stem}-tables/{i:02d}-{name}.csv"] = _written(table)
    return files


def slug(text: str) -> str:
    """Return text as part of a file name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:LONGEST_NAME].strip("-")


def _written(table: Table) -> str:
    """Return one line of headings, then one line per row; an interval takes two more columns."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    spread = [
        any(isinstance(row[i], Spread) for row in table.rows) for i in range(len(table.columns))
    ]
    names: list[str] = []
    for column, wide in zip(table.columns, spread, strict=True):
        names += [column.name, *[f"{column.name} {end}" for end in ("low", "high")] * wide]
    writer.writerow(names)
    for row in table.rows:
        cells: list[Cell] = []
        for cell, wide in zip(row, spread, strict=True):
            cells += _cells(cell, wide)
        writer.writerow(cells)
    return stream.getvalue()


def _cells(cell: Cell, wide: bool) -> list[Cell]:
    if isinstance(cell, Spread):
        return [cell.value, cell.low, cell.high]
    return [cell, None, None] if wide else [cell]
