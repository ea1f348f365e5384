"""`longseq verify RESULTS`: lines of records that were altered, are damaged, or are not records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longseq_bench.cli import options

if TYPE_CHECKING:
    from longseq_bench.reports.document import Document
    from longseq_bench.store import Loaded

    Files = dict[Path, Loaded]


def verify(
    results: Annotated[
        list[Path],
        typer.Argument(help="Results folders, folders of them, or records.jsonl files."),
    ],
    as_json: options.AsJson = False,
) -> int:
    """Check every line of records against its checksum; list broken lines. Writes nothing.

    A line is broken if it was altered after it was written, or if it is not a record. Other
    commands skip such a line and count it. Lines of versions before checksums have none; they are
    counted, and an altered number in them is not found.

    Exit code 1 if a line is broken.
    """
    from longseq_bench.api.loading import record_files
    from longseq_bench.cli import BROKEN_LINES
    from longseq_bench.cli.session import print_answer
    from longseq_bench.store import read

    files = {path: read(path) for path in record_files(results)}
    return print_answer(
        as_json,
        lambda: {"schema": 1, "files": [_as_json(*item) for item in files.items()]},
        lambda: _document(files),
        "--json has them",
        BROKEN_LINES if any(file.broken for file in files.values()) else 0,
    )


def _as_json(path: Path, file: Loaded) -> dict[str, Any]:
    from longseq_bench.store import count_checksums

    with_checksum = count_checksums(path)
    return {
        "file": str(path),
        "lines": file.lines,
        "with_checksum": with_checksum,
        "without_checksum": file.lines - with_checksum,
        "newer": [number for numbers in file.newer.values() for number in numbers],
        "broken": [{"line": number, "reason": why} for number, why in file.reasons.items()],
    }


def _document(files: Files) -> Document:
    from longseq_bench.reports.document import Column, Document, Section, Table
    from longseq_bench.store import count_checksums

    names = ("Lines", "With checksum", "Without checksum", "Broken", "Newer schema")
    counts = tuple(
        (str(path), file.lines, checked := count_checksums(path), file.lines - checked,
         len(file.broken), sum(map(len, file.newer.values())))
        for path, file in files.items()
    )  # fmt: skip
    broken = tuple(
        (str(path), number, reason)
        for path, file in files.items()
        for number, reason in file.reasons.items()
    )
    columns = (Column("File"), *(Column(name, "count") for name in names))
    found = (Column("File"), Column("Line", "count"), Column("Reason"))
    tables = [Table("", columns, counts)]
    tables += [Table("Broken lines", found, broken)] if broken else []
    return Document("verify", "", [], [Section("", tables=tables)])
