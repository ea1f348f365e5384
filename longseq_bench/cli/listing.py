"""`longseq list`: implementations, their options, and the reasons why some can't run here."""

from longseq_bench.cli import options


def listing(as_json: options.AsJson = False) -> int:
    """List implementations with options, defaults, help, and the reason if one is unavailable."""
    from longseq_bench.cli.documents import catalogue_document
    from longseq_bench.cli.session import print_answer
    from longseq_bench.launchers.local import LocalLauncher

    with LocalLauncher() as launcher:
        catalogue = launcher.catalogue()
    return print_answer(
        as_json,
        lambda: {"schema": 1, **catalogue.model_dump(mode="json")},
        lambda: catalogue_document(catalogue),
        "--json has them",
    )
