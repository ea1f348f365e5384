"""`longseq list`: what can be run here, with which options, and why not."""

from __future__ import annotations

from typing import Annotated

import typer


def listing(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """List implementations, their options with defaults and help, and why one is unavailable."""
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.cli.tables import catalogue_table
    from longseq_bench.launchers.local import LocalLauncher

    with LocalLauncher() as launcher:
        catalogue = launcher.catalogue()
    if as_json:
        print_json({"schema": 1, **catalogue.model_dump(mode="json")})
    else:
        console().print(catalogue_table(catalogue))
    return 0
