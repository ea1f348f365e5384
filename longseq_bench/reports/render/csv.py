"""Documents as CSV (RFC 4180): raw values, SI units, empty where unknown.

The main file is the tidy data, one row per measurement. Each table has a file of its own. Text that
a spreadsheet would run as a formula begins with an apostrophe; numbers stay as they are.
"""

import csv
import io
import math
import re
from functools import lru_cache

from longseq_bench.core.errors import keep_lines
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Cell, Document, Spread, Table

MAX_NAME = 60
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@FORMATS.register("csv")
def render(document: Document) -> Files:
    """`<stem>.csv`, and `<stem>-tables/NN-title.csv` for each table."""
    files = {f"{document.stem}.csv": format_table(document.data)}
    tables = [(section.title, t) for section in document.sections for t in section.tables]
    for i, (title, table) in enumerate(tables, 1):
        name = slug(f"{title} {table.title}")
        files[f"{document.stem}-tables/{i:02d}-{name}.csv"] = format_table(table)
    return files


def slug(text: str) -> str:
    """Return text as part of a file name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME].strip("-")


def format_table(table: Table) -> str:
    """Return one line of headings, then one line per row; an interval takes two more columns."""
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    written: list[list[str | float | None]] = []
    for column, cells in zip(table.columns, columns, strict=True):
        written.append([_text(column.name), *map(_plain, cells)])
        if any(isinstance(cell, Spread) for cell in cells):
            for end in ("low", "high"):
                bounds = (
                    getattr(cell, end) if isinstance(cell, Spread) else None for cell in cells
                )
                written.append([_text(f"{column.name} {end}"), *bounds])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(zip(*written, strict=True))
    return file.getvalue()


def _plain(cell: Cell) -> str | int | float | None:
    if isinstance(cell, str):
        return _text(cell)
    return cell.value if isinstance(cell, Spread) else cell


@lru_cache(1_000)  # rows are many, and most of their texts are equal
def _text(text: str) -> str:
    """Return a text that is data in a spreadsheet: no formula, no control characters."""
    kept = keep_lines(text)
    is_formula = text.startswith(_FORMULA) or kept.startswith(_FORMULA)
    return f"'{kept}" if is_formula and not _is_numbers(kept) else kept


def _is_numbers(text: str) -> bool:
    """Return True for one number or several with spaces between, also as a percentage."""
    try:
        return all(map(math.isfinite, map(float, text.removesuffix("%").split())))
    except ValueError:
        return False
