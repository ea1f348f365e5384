"""A document as JSON: its sentences, and every table and chart as raw values in SI units."""

import json
from dataclasses import asdict
from typing import Any

from longseq_bench.analysis.frames import finite
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Document, Table

SCHEMA = 1


@FORMATS.register("json")
def render(document: Document) -> Files:
    """Return one JSON document; unknown and non-finite values are null."""
    text = json.dumps(as_json(document), indent=1, ensure_ascii=False, allow_nan=False)
    return {f"{document.stem}.json": text + "\n"}


def as_json(document: Document) -> dict[str, Any]:
    """{"schema", "kind", "title", "paragraphs", "figures", "sections"}."""
    return {
        "schema": SCHEMA,
        "kind": document.kind,
        "title": document.title,
        "paragraphs": list(document.paragraphs),
        "figures": [asdict(figure) for figure in document.figures],
        "sections": [
            {
                "title": section.title,
                "paragraphs": list(section.paragraphs),
                "points": list(section.points),
                "charts": finite(section.charts),
                "tables": [_table(table) for table in section.tables],
                "code": list(section.code),
            }
            for section in document.sections
        ],
    }


def _table(table: Table) -> dict[str, Any]:
    columns = [{"name": one.name, "kind": one.kind} for one in table.columns]
    return {"title": table.title, "columns": columns, "rows": finite(table.rows)}
