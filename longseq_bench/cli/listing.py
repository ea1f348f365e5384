"""`longseq list`: implementations, their options, and the reasons why some can't run here."""

from typing import Annotated

import typer


def listing(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> int:
    """List implementations with options, defaults, help, and the reason if one is unavailable."""
    from longseq_bench.cli.documents import catalogue_document
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.launchers.local import LocalLauncher
    from longseq_bench.reports.render.terminal import print_document

    with LocalLauncher() as launcher:
        catalogue = launcher.catalogue()
    if as_json:
        print_json({"schema": 1, **catalogue.model_dump(mode="json")})
    else:
        print_document(catalogue_document(catalogue), console(), "--json has them")
    return 0
