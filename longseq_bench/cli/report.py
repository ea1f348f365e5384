"""`longseq report RESULTS`: a report from records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longseq_bench.cli import options
from longseq_bench.core.errors import UnknownNameError, UserError

TERMINAL = "terminal"  # the format that writes no file


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Results folders, folders of them, or records.jsonl files."),
    ],
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            help="Formats, separated by commas: html,md,csv,json; terminal: print, write no file.",
        ),
    ] = "md,csv",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to. Default: the folder of the first results."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="Kinds of report, separated by commas: summary, extreme, devices, scaling, "
            "capabilities, implementations; all: every kind; auto: kinds for which there are "
            "records."
        ),
    ] = "summary",
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Implementation or label whose speed is 1. Default: the one in the config."
        ),
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option(
            "--published",
            "--beside",
            help="YAML file with published maximum lengths, for an extra column. Default: none.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print rows and maxima as one JSON document on stdout. Default: files only.",
        ),
    ] = False,
) -> int:
    """Write reports from records, or print them; every number comes from the records."""
    from longseq_bench.analysis.frames import maxlen_json, sweep_json
    from longseq_bench.api.loading import load
    from longseq_bench.cli.session import console, print_json, print_lines, print_notes
    from longseq_bench.reports import write_documents
    from longseq_bench.reports.published_results import read
    from longseq_bench.reports.render import html, markdown
    from longseq_bench.reports.render.terminal import print_documents

    format_names, kinds = _parse_formats(formats, as_json), _names(kind, "--kind summary")
    found = load(*results)
    print_notes(found.notes)
    if "html" in format_names:
        html.prepare()
    built = found.documents(kinds, baseline, read(published) if published else None)
    file_formats = [name for name in format_names if name != TERMINAL]
    paths = write_documents(built, out or found.folder or Path(), file_formats)
    if TERMINAL in format_names:
        print_documents(built, console())
    if as_json:
        print_json({**sweep_json(found.records), **maxlen_json(found.records)})
    print_lines(f"wrote {path}" for path in paths)
    if "md" in file_formats:
        print_notes(sorted({note for one in built if (note := markdown.missing_charts(one))}))
    return 0


def _parse_formats(text: str, as_json: bool) -> list[str]:
    """Return the names of the formats.

    Raises UserError for an unknown format, and if both --format and --json print on stdout.
    """
    from longseq_bench.reports.base import FORMATS

    known, names = [*FORMATS.names(), TERMINAL], _names(text, "--format md,csv")
    for name in names:
        if name not in known:
            raise UnknownNameError("report format", name, known)
    if as_json and TERMINAL in names:
        raise UserError("--format terminal and --json both print on stdout; leave one out")
    return names


def _names(text: str, example: str) -> list[str]:
    names = options.split_names(text)
    if not names:
        raise UserError(f"{example.split()[0]} is empty; write {example}")
    return names
