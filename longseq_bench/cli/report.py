"""`longseq report RESULTS`: a report from records alone."""

from __future__ import annotations

from pathlib import Path

from longseq_bench.cli import options
from longseq_bench.core.errors import UnknownNameError, UserError

TERMINAL = "terminal"  # the format that writes no file


def report(
    results: list[Path],
    formats: options.Formats = "md,csv",
    out: Path | None = None,
    kind: str = "summary",
    baseline: str | None = None,
    track: str | None = None,
) -> int:
    """Write reports from records, or print them; every number comes from the records.

    Options:
        results: Results folders, folders of them, or records.jsonl files.
        formats: Formats, separated by commas: html,md,csv,parquet,json; terminal: print, write no
            file. md is one page, and a second file with the details.
        out: Folder to write to. Default: the folder of the first results.
        kind: Kinds of report, separated by commas: summary, extreme, devices, scaling,
            capabilities, implementations; all: every kind; auto: kinds for which there are records.
        baseline: Implementation or label whose speed is 1. Default: the one in the config.
        track: Also write rows and the page to a tracker, as a run of a project: trackio or
            wandb:PROJECT. Default: none.
    """
    from longseq_bench.api.results import load
    from longseq_bench.api.tracking import track as write_run
    from longseq_bench.cli.session import print_documents, print_lines
    from longseq_bench.reports.base import FORMATS
    from longseq_bench.reports.kinds import write_documents
    from longseq_bench.reports.render import markdown

    known = [*FORMATS.names(), TERMINAL]
    format_names, kinds = options.split_names(formats), options.split_names(kind)
    for name in format_names:
        if name not in known:
            raise UnknownNameError("report format", name, known)
    if not format_names or not kinds:
        raise UserError("--format or --kind is empty; write --format md,csv --kind summary")
    file_formats = [name for name in format_names if name != TERMINAL]
    found = load(*results)
    if "html" in file_formats:
        from longseq_bench.reports.render.html import start_vega

        start_vega()  # while the documents are built
    print_lines(found.notes, "yellow")
    built = found.documents(kinds, baseline)
    paths = write_documents(built, out or found.folder or Path(), file_formats)
    if track:
        write_run(found, built[0], track)
    if TERMINAL in format_names:
        print_documents(built)
    print_lines(f"wrote {path}" for path in paths)
    if "md" in file_formats:
        notes = {note for one in built if (note := markdown.missing_charts(one))}
        print_lines(sorted(notes), "yellow")
    return 0
