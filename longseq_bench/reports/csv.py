"""The tidy data behind a document as CSV (RFC 4180): raw values, SI units, empty where unknown."""

from __future__ import annotations

import csv
import io

from longseq_bench.reports.base import FORMATS
from longseq_bench.reports.document import Document, Spread


@FORMATS.register("csv")
def render(document: Document) -> str:
    """One line of headings, then one line a row of `document.data`."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(column.name for column in document.data.columns)
    for row in document.data.rows:
        writer.writerow(cell.value if isinstance(cell, Spread) else cell for cell in row)
    return stream.getvalue()
