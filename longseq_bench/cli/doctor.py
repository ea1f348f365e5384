"""`longseq doctor`: check this machine, and print remedies for what is missing."""

from longseq_bench.cli import options
from longseq_bench.core.errors import LauncherError


def doctor(as_json: options.AsJson = False) -> int:
    """Check this machine: what it has, what is missing, what makes times vary, and what to do."""
    from dataclasses import asdict

    from longseq_bench.cli import BAD_INPUT
    from longseq_bench.cli.documents import findings_document
    from longseq_bench.cli.session import print_answer, print_lines
    from longseq_bench.doctor import examine
    from longseq_bench.environment import collect
    from longseq_bench.launchers.local import LocalLauncher

    machine, code = collect(), 0
    try:
        with LocalLauncher() as launcher:
            catalogue = launcher.catalogue()
    except LauncherError as error:
        print_lines([str(error)], "red")
        catalogue, code = None, BAD_INPUT
    findings = examine(catalogue, machine)
    return print_answer(
        as_json,
        lambda: {
            "schema": 1,
            "environment": machine.model_dump(mode="json"),
            "findings": [asdict(finding) for finding in findings],
        },
        lambda: findings_document(machine, findings),
        "--json has it",
        code,
    )
