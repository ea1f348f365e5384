"""Commands that list: `longseq list`, `models` and `doctor`."""

from __future__ import annotations

from longseq_bench.cli import options
from longseq_bench.core.errors import LauncherError


def listing(impl: list[str] | None = None, as_json: options.AsJson = False) -> int:
    """List implementations with options, defaults, help, and the reason if one is unavailable.

    Options:
        impl: List only this implementation (repeatable); also a function of your own, as
            path/to/file.py:function or module:function. Default: all, and the kernels.
    """
    from longseq_bench.cli.documents import catalogue_document
    from longseq_bench.cli.session import print_answer
    from longseq_bench.core.registry import canonical_name, is_own
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


def models(model: list[str] | None = None, as_json: options.AsJson = False) -> int:
    """List the models that --model knows: their attention, layers, parameters and source.

    Each is read from an excerpt of the config.json that its publisher keeps on Hugging Face.

    Options:
        model: Show this model instead (repeatable): a name, or the path of a Hugging Face
            config.json. Default: all built-in models.
    """
    from longseq_bench.cli.documents import models_document
    from longseq_bench.cli.session import print_answer
    from longseq_bench.config.models import built_in_models, load_model

    shapes = [load_model(name) for name in model] if model else list(built_in_models())
    return print_answer(
        as_json,
        lambda: {"schema": 1, "models": [shape.model_dump(mode="json") for shape in shapes]},
        lambda: models_document(shapes),
        "--json has them",
    )


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
    data = {"environment": machine.model_dump(mode="json"), "findings": list(map(asdict, findings))}
    document = findings_document(machine, findings)
    return print_answer(
        as_json, lambda: {"schema": 1} | data, lambda: document, "--json has it", code
    )
