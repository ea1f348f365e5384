"""`longseq doctor`: check this machine, and print remedies for what is missing."""

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout. Default: a table.")
    ] = False,
) -> int:
    """Check this machine: what it has, what is missing, and how to fix it."""
    from dataclasses import asdict

    from longseq_bench.cli.documents import findings_document
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.core.errors import LauncherError
    from longseq_bench.doctor import examine
    from longseq_bench.environment import collect
    from longseq_bench.launchers.local import LocalLauncher
    from longseq_bench.reports.render.terminal import print_document

    machine = collect()
    try:
        with LocalLauncher() as launcher:
            catalogue = launcher.catalogue()
    except LauncherError as error:
        console(stderr=True).print(f"[red]{error}[/red]")
        catalogue = None
    findings = examine(catalogue, machine)
    if as_json:
        environment = machine.model_dump(mode="json")
        print_json(
            {"schema": 1, "environment": environment, "findings": [asdict(f) for f in findings]}
        )
    else:
        print_document(findings_document(machine, findings), console(), "--json has it")
    return 0
