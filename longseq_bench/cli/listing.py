"""`longseq list`: implementations, their options, and the reasons why some can't run here."""

from typing import Annotated

import typer

from longseq_bench.cli import options


def listing(
    impl: Annotated[
        list[str] | None,
        typer.Option(
            help="List only this implementation (repeatable); also a function of your own, as "
            "path/to/file.py:function or module:function. Default: all, and the kernels."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """List implementations with options, defaults, help, and the reason if one is unavailable."""
    from longseq_bench.cli.documents import catalogue_document
    from longseq_bench.cli.session import print_answer
    from longseq_bench.core.own_functions import canonical_name, is_own
    from longseq_bench.launchers.local import LocalLauncher

    with LocalLauncher() as launcher:
        catalogue = launcher.catalogue([canonical_name(n) for n in impl or () if is_own(n)])
    if impl:
        found = {canonical_name(name): catalogue.entry(name, "--impl") for name in impl}
        catalogue = catalogue.model_copy(update={"implementations": found, "kernels": {}})
    return print_answer(
        as_json,
        lambda: {"schema": 1, **catalogue.model_dump(mode="json", exclude={"mistakes"})},
        lambda: catalogue_document(catalogue),
        "--json has them",
    )
