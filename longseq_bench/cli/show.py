"""`longseq show RESULTS`: records in a terminal, chosen and sorted, with what they look like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def show(
    results: Annotated[list[Path], typer.Argument(help="Results folders or records.jsonl files.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows for which it holds: status!=ok, tokens>=4k, time<10ms, peak>1MiB, "
            "label~zigzag, option.chunk=64. Repeat: all must hold."
        ),
    ] = None,
    sort: Annotated[
        list[str] | None,
        typer.Option(help="Field to sort by; -time is descending. Repeat for equal ones."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Fields to show beside labels, with commas; passes is the sparkline of its passes."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows to show at most. Default: all.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The same rows as one JSON document on stdout.")
    ] = False,
) -> int:
    """Show records in the terminal: filtered, sorted, with sparklines. Writes nothing."""
    from longseq_bench.cli.session import console, print_json, read_results
    from longseq_bench.cli.view import chosen, print_view
    from longseq_bench.reports.render.terminal_text import plain

    records, notes = read_results(results)
    screen = console(stderr=True)
    for note in notes:
        screen.print(plain(note, "yellow"))
    names = [name.strip() for name in (columns or "").split(",") if name.strip()]
    view = chosen(records, where or [], sort or [], names, limit)
    if as_json:
        print_json(view.document())
    else:
        print_view(view, console())
    return 0
