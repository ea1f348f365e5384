"""Documents as CSV (RFC 4180): raw values, SI units, empty where unknown.

The main file is the tidy data, one row per measurement. Each table has a file of its own. Text that
a spreadsheet would run as a formula begins with an apostrophe; numbers stay as they are.
"""

import csv
import math
import re
from collections.abc import Sequence

from longseq_bench.core.errors import keep_lines
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Cell, Document, Spread, Table

MAX_NAME = 60
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@FORMATS.register("csv")
def render(document: Document) -> Files:
    """`<stem>.csv`, and `<stem>-tables/NN-title.csv` for each table."""
    files = {f"{document.stem}.csv": _format_table(document.data)}
    tables = [(section.title, t) for section in document.sections for t in section.tables]
    for i, (title, table) in enumerate(tables, 1):
        name = slug(f"{title} {table.title}")
        files[f"{document.stem}-tables/{i:02d}-{name}.csv"] = _format_table(table)
    return files


def slug(text: str) -> str:
    """Return text as part of a file name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME].strip("-")


def _format_table(table: Table) -> str:
    return "".join(format_lines(table))


def format_lines(table: Table) -> list[str]:
    """Return one line of headings, then one line per row; an interval takes two more columns."""
    lines = _Lines()
    writer = csv.writer(lines, lineterminator="\n")
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    names: list[str] = []
    values: list[Sequence[Cell]] = []
    for column, cells in zip(table.columns, columns, strict=True):
        names.append(_text(column.name))
        kinds = set(map(type, cells))
        values.append(_plain_column(cells, kinds))
        if Spread in kinds:
            names += [f"{column.name} low", f"{column.name} high"]
            values += [
                [getattr(cell, end) if isinstance(cell, Spread) else None for cell in cells]
                for end in ("low", "high")
            ]
    writer.writerow(names)
    writer.writerows(zip(*values, strict=True))
    return lines


def _plain_column(cells: Sequence[Cell], kinds: set[type]) -> Sequence[Cell]:
    """Return the cells as they are written; each text is checked once, for rows are many."""
    if Spread in kinds:
        return [_plain(cell) for cell in cells]
    if str not in kinds:
        return cells
    texts = {cell: _text(cell) for cell in set(cells) if isinstance(cell, str)}
    return [texts.get(cell, cell) if isinstance(cell, str) else cell for cell in cells]


def _plain(cell: Cell) -> str | int | float | None:
    if isinstance(cell, str):
        return _text(cell)
    return cell.value if isinstance(cell, Spread) else cell


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


class _Lines(list[str]):
    """A list that the CSV writer fills, one call per line."""

    write = list.append
