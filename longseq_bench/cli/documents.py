"""Documents of commands that list: implementations, models, checks, and planned trials."""

from collections.abc import Sequence

from longseq_bench.api.progress import TrialLabels, format_option
from longseq_bench.core.catalogue import Catalogue, Entry
from longseq_bench.core.model import Environment, Trial
from longseq_bench.core.model_files import describe_layers
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.doctor import Finding
from longseq_bench.reports.columns import ValueColumn, build_table, make_columns
from longseq_bench.reports.document import Document, Section, Table
from longseq_bench.reports.groups import capitalize_first


def catalogue_document(catalogue: Catalogue) -> Document:
    """Return a section per implementation, and the kernels."""
    sections = [_entry(name, one, catalogue) for name, one in catalogue.implementations.items()]
    kernels = [
        (name, one.summary, one.device, one.unavailable) for name, one in catalogue.kernels.items()
    ]
    explanation = "One of these computes exact attention on a device; the option kernel names it."
    if kernels:
        headings = make_columns("Kernel, What it is, Device, Not here because")
        table = Table("", headings, tuple(kernels))
        sections.append(Section("Kernels", [explanation], tables=[table]))
    return Document("list", "", [], sections)


def _entry(name: str, entry: Entry, catalogue: Catalogue) -> Section:
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
    headings = make_columns("Option and default, Meaning")
    tables = [Table("", headings, tuple(rows))] if rows else []
    return Section(name, [capitalize_first(entry.summary), *unavailable, *missing], tables=tables)


def models_document(shapes: Sequence[ModelShape]) -> Document:
    """Return a row per model, and notes on them."""
    columns = [
        ValueColumn("Model", "text", lambda one: one.name),
        ValueColumn("Heads", "count", lambda one: _of_kinds(one, "heads"), 9),
        ValueColumn("KV heads", "count", lambda one: _of_kinds(one, "kv_heads"), 9),
        ValueColumn("Head dim", "count", lambda one: _of_kinds(one, "head_dim", "v_head_dim"), 9),
        ValueColumn("Layers", "count", lambda one: describe_layers(one.kinds), 9),
        ValueColumn("Hidden", "count", lambda one: one.hidden_size, 4),
        ValueColumn("Dtype", "text", lambda one: one.dtype, 6),
        ValueColumn(
            "Parameters", "text", lambda one: one.parameters and f"{one.parameters / 1e9:.1f} G", 7
        ),
        ValueColumn("Source", "text", lambda one: one.source, 5),
    ]
    names: dict[str, list[str]] = {}
    for shape in shapes:
        for note in [*shape.notes, *filter(None, [shape.parameters_reason])]:
            names.setdefault(note, []).append(shape.name)
    notes = [f"{', '.join(of_note)}: {note}" for note, of_note in names.items()]
    explanation = (
        "Head dim: of q and k / of v. Layers: kinds, with the tokens that each sees; figures with "
        "commas are of these kinds. Parameters: matrices and embeddings by formula, without norms "
        "and biases; the published number of hybrids and Gemma 4."
    )
    table = Section("", tables=[build_table("", columns, shapes)])
    return Document("models", "", [], [table, Section("", [explanation], points=notes)])


def _of_kinds(shape: ModelShape, *fields: str) -> str:
    """Return fields of all kinds of layers with keys; equal values are said once."""
    kinds = [[str(getattr(one, field)) for field in fields] for one in shape.kinds if one.heads]
    return ", ".join(dict.fromkeys("/".join(dict.fromkeys(values)) for values in kinds))


def findings_document(machine: Environment, findings: Sequence[Finding]) -> Document:
    """Return a row per check of `longseq doctor`."""
    rows = [(one.name, one.state, one.found, one.remedy) for one in findings]
    table = Table("", make_columns("Check, State, Found, What to do"), tuple(rows))
    context = f"{machine.host}: {machine.cpu}, {machine.os}"
    return Document("doctor", "", [context], [Section("", tables=[table])])


def trials_document(trials: Sequence[Trial], rounds: int, heading: str, estimate: str) -> Document:
    """Return the list of the trials that a sweep would run.

    heading: the device that they would use.  estimate: what they would take, the last line.
    """
    columns = [
        ValueColumn("Trial", "text", TrialLabels(trials).label),
        ValueColumn("Memory budget", "bytes", lambda one: one.memory_budget),
    ]
    summary = f"{len(trials)} trials × {rounds} round{'s' if rounds > 1 else ''}; nothing was run"
    table = build_table("", columns, trials)
    sections = [Section("", tables=[table]), Section("", [summary, estimate])]
    return Document("trials", "", [heading], sections)
