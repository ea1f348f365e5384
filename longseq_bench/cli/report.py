"""`longseq report RESULTS`: a report from records alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longseq_bench.model import Record


def report(
    results: Annotated[list[Path], typer.Argument(help="Results folders or records.jsonl files.")],
    formats: Annotated[str, typer.Option("--format", help="With commas: md,csv.")] = "md,csv",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: that of the first results.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Which report.")] = "summary",
    baseline: Annotated[
        str | None, typer.Option(help="Implementation whose speed is 1; default: that of config.")
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="YAML of others' maxima, a column beside ours.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Rows and maxima as one JSON document on stdout.")
    ] = False,
) -> int:
    """Write a report from records: Markdown and CSV, every number from the records."""
    from longseq_bench.cli.common import console, print_json
    from longseq_bench.errors import UserError
    from longseq_bench.reports import write_report
    from longseq_bench.reports.elsewhere import read
    from longseq_bench.store import load
    from longseq_bench.table import maxlen_json, sweep_json

    loaded = [load(path) for path in results]
    records = [record for one in loaded for record in one.records]
    notes = [note for one in loaded for note in one.notes]
    screen = console(stderr=True)
    for note in notes:
        screen.print(f"[yellow]{note}[/yellow]")
    folder = out or (results[0] if results[0].is_dir() else results[0].parent)
    wanted = [f.strip() for f in formats.split(",") if f.strip()]
    if not wanted:
        raise UserError("--format names no format; write md,csv")
    paths = write_report(
        records, folder, wanted, kind, baseline or _baseline_of(results[0], records), notes,
        read(beside) if beside else None,
    )  # fmt: skip
    if as_json:
        print_json({**sweep_json(records), **maxlen_json(records)})
    for path in paths:
        screen.print(f"wrote {path}")
    return 0


def _baseline_of(results: Path, records: list[Record]) -> str | None:
    """The baseline that the sweep's own config names, kept beside its records, if it ran."""
    import yaml

    config = (results if results.is_dir() else results.parent) / "config.yaml"
    try:
        kept = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    named = kept.get("baseline") if isinstance(kept, dict) else None
    ran = {record.trial.implementation for record in records}
    return str(named) if named and str(named).split(" ")[0] in ran else None
