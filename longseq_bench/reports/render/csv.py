"""Documents as CSV (RFC 4180): raw values, SI units, empty where unknown.

It has one row per measurement. Text that a spreadsheet would run as a formula begins with an
apostrophe; numbers stay as they are.
"""

import csv
import io
import math
import re
from functools import lru_cache

from longseq_bench.core.errors import keep_lines
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Document, Table

MAX_NAME = 60
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@FORMATS.register("csv")
def render(document: Document) -> Files:
    """`<stem>.csv`."""
    return {f"{document.stem}.csv": format_table(document.data)}


def slug(text: str) -> str:
    """Return text as part of a file name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME].strip("-")


def format_table(table: Table) -> str:
    """Return one line of headings, then one line per row."""
    headings = [column.name for column in table.columns]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(
        [_text(cell) if isinstance(cell, str) else cell for cell in row]
        for row in (headings, *table.rows)
    )
    return file.getvalue()


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
