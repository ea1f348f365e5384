"""Commands that list: `longseq list`, `longseq models`, `longseq doctor`; and planned trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from longseq_bench.cli import options
from longseq_bench.core.errors import LauncherError

if TYPE_CHECKING:
    from longseq_bench.core.catalogue import Catalogue, Entry
    from longseq_bench.core.model import Trial
    from longseq_bench.core.models import ModelShape
    from longseq_bench.reports.document import Document, Section


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
        lambda: _catalogue_document(catalogue),
        "--json has them",
    )


def _catalogue_document(catalogue: Catalogue) -> Document:
    """Return a section per implementation, and the kernels."""
    from longseq_bench.reports.document import Column, Document, Section, Table

    sections = [_entry(name, one, catalogue) for name, one in catalogue.implementations.items()]
    kernels = tuple(
        (name, one.summary, one.device, one.unavailable) for name, one in catalogue.kernels.items()
    )
    columns = (Column("Kernel"), Column("What it is"), Column("Device"), Column("Not here because"))
    explanation = "One of these computes exact attention on a device; the option kernel names it."
    if kernels:
        sections.append(Section("Kernels", [explanation], tables=[Table("", columns, kernels)]))
    return Document("list", "", [], sections)


def _entry(name: str, entry: Entry, catalogue: Catalogue) -> Section:
    """Return the summary of an implementation, its options, and why it is unavailable."""
    from longseq_bench.api.trial_text import format_option
    from longseq_bench.reports.document import Column, Section, Table
    from longseq_bench.reports.groups import capitalize_first

    unavailable = [
        f"Not on {device}: {reason}"
        for device, reason in entry.unavailable.items()
        if not catalogue.devices[device].unavailable
    ]
    missing = [f"Not supported: {reason}" for reason in entry.missing]
    rows = [
        (
            f"{spec.name}={format_option(spec.default)}",
            spec.help + (f" ({', '.join(spec.choices)})" if spec.choices else ""),
        )
        for spec in entry.options
    ]
    table = Table("", (Column("Option and default"), Column("Meaning")), tuple(rows))
    summary = [capitalize_first(entry.summary), *unavailable, *missing]
    return Section(name, summary, tables=[table] if rows else [])


def models(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Show this model instead (repeatable): a name, or the path of a Hugging Face "
            "config.json. Default: all built-in models."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """List the models that --model knows: their attention, layers, parameters and source.

    Each is read from an excerpt of the config.json that its publisher keeps on Hugging Face.
    """
    from longseq_bench.cli.session import print_answer
    from longseq_bench.core.models import built_in_models, load_model

    shapes = [load_model(name) for name in model] if model else list(built_in_models())
    return print_answer(
        as_json,
        lambda: {"schema": 1, "models": [shape.model_dump(mode="json") for shape in shapes]},
        lambda: _models_document(shapes),
        "--json has them",
    )


def _models_document(shapes: list[ModelShape]) -> Document:
    from longseq_bench.reports.columns import ValueColumn, build_table
    from longseq_bench.reports.document import Document, Section

    def v_head_dim(shape: ModelShape) -> int | None:
        return shape.v_head_dim if shape.v_head_dim != shape.head_dim else None

    def parameters(shape: ModelShape) -> str:
        return f"{shape.parameters / 1e9:.1f} G" if shape.parameters else "—"

    columns = [
        ValueColumn("Model", "text", lambda one: one.name),
        ValueColumn("Heads", "count", lambda one: one.heads, 9),
        ValueColumn("KV heads", "count", lambda one: one.kv_heads, 9),
        ValueColumn("Head dim", "count", lambda one: one.head_dim, 9),
        ValueColumn("V head dim", "count", v_head_dim, 8),
        ValueColumn("Layers", "count", lambda one: one.layers, 8),
        ValueColumn("Hidden", "count", lambda one: one.hidden_size, 4),
        ValueColumn("Dtype", "text", lambda one: one.dtype or "—", 6),
        ValueColumn("Parameters", "text", parameters, 7),
        ValueColumn("Source", "text", lambda one: one.source, 5),
    ]
    notes = [
        f"{shape.name}: {note}"
        for shape in shapes
        for note in [*shape.notes, *filter(None, [shape.parameters_reason])]
    ]
    explanation = (
        "Parameters: matrices and embeddings by formula, without norms and biases. V head dim: of "
        "v and the output, where it is unlike that of q and k."
    )
    table = Section("", tables=[build_table("", columns, shapes)])
    return Document("models", "", [], [table, Section("", [explanation], points=notes)])


def doctor(as_json: options.AsJson = False) -> int:
    """Check this machine: what it has, what is missing, what makes times vary, and what to do."""
    from dataclasses import asdict

    from longseq_bench.cli import BAD_INPUT
    from longseq_bench.cli.session import print_answer, print_lines
    from longseq_bench.doctor import examine
    from longseq_bench.environment import collect
    from longseq_bench.launchers.local import LocalLauncher
    from longseq_bench.reports.document import Column, Document, Section, Table

    machine, code = collect(), 0
    try:
        with LocalLauncher() as launcher:
            catalogue = launcher.catalogue()
    except LauncherError as error:
        print_lines([str(error)], "red")
        catalogue, code = None, BAD_INPUT
    findings = examine(catalogue, machine)

    def document() -> Document:
        columns = tuple(map(Column, ("Check", "State", "Found", "What to do")))
        rows = tuple((f.name, f.state, f.found, f.remedy) for f in findings)
        table = Section("", tables=[Table("", columns, rows)])
        return Document("doctor", "", [f"{machine.host}: {machine.cpu}, {machine.os}"], [table])

    return print_answer(
        as_json,
        lambda: {
            "schema": 1,
            "environment": machine.model_dump(mode="json"),
            "findings": [asdict(finding) for finding in findings],
        },
        document,
        "--json has it",
        code,
    )


def trials_document(trials: Sequence[Trial], rounds: int, heading: str, estimate: str) -> Document:
    """Return the list of the trials that a sweep would run.

    heading: the device that they would use.  estimate: what they would take, the last line.
    """
    from longseq_bench.api.trial_text import format_options
    from longseq_bench.core.masks import mode_words
    from longseq_bench.reports.columns import ValueColumn, build_table
    from longseq_bench.reports.document import Document, Section

    columns = [
        ValueColumn("Implementation", "text", lambda one: one.implementation),
        ValueColumn("Options", "text", lambda one: format_options(one) or None),
        ValueColumn("Tokens", "tokens", lambda one: one.workload.seq_len),
        ValueColumn("Ranks", "count", lambda one: one.world_size, of_ranks=True),
        ValueColumn("Dtype", "text", lambda one: one.workload.dtype),
        ValueColumn(
            "Mode", "text", lambda one: mode_words(one.workload.mode, one.workload.new_tokens)
        ),
        ValueColumn("Mask", "text", lambda one: one.workload.visibility.label),
        ValueColumn("Device", "text", lambda one: one.device),
        ValueColumn("Memory budget", "bytes", lambda one: one.memory_budget),
    ]
    summary = f"{len(trials)} trials × {rounds} round{'s' if rounds > 1 else ''}; nothing was run"
    table = build_table("", columns, trials, keep_empty=True)
    sections = [Section("", tables=[table]), Section("", [summary, estimate])]
    return Document("trials", "", [heading], sections)
