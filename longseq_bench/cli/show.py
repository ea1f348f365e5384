"""`longseq show RESULTS`: records in the terminal, filtered and sorted."""

from pathlib import Path
from typing import Annotated

import typer

from longseq_bench.cli import options


def show(
    results: list[Path],
    where: list[str] | None = None,
    sort: list[str] | None = None,
    columns: str | None = None,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: options.AsJson = False,
) -> int:
    """Show records in the terminal: filtered and sorted. Writes nothing.

    Options:
        results: Results folders or records.jsonl files.
        where: Condition on rows: status!=ok, tokens>=4k, time<10ms, peak>1MiB, label~zigzag,
            option.chunk=64 (repeatable; all must hold). Default: all rows.
        sort: Field to sort by; -time is descending (repeatable, for ties). Default: the order of
            the records.
        columns: Fields to show, separated by commas. Default: those that suit the rows.
        limit: Maximum number of rows. Default: all.
    """
    from longseq_bench.analysis.frames import rows_json
    from longseq_bench.api.results import load
    from longseq_bench.cli.row_filter import filter_rows
    from longseq_bench.cli.session import print_answer, print_lines
    from longseq_bench.cli.show_document import show_document

    found, names, conditions = load(*results), options.split_names(columns), where or []
    print_lines(found.notes, "yellow")
    every = [*found.rows, *found.maxima]
    rows = filter_rows(found.rows, every, conditions, sort or [])
    searches = filter_rows(found.maxima, every, conditions, sort or [])
    return print_answer(
        as_json,
        lambda: rows_json(rows[:limit], "rows") | rows_json(searches[:limit], "results"),
        lambda: show_document(found, rows, searches, conditions, names, limit),
        "a wider terminal, --columns or --json has them",
    )
