"""`longseq models`: the built-in shapes of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from longseq_bench.cli import options

if TYPE_CHECKING:
    from longseq_bench.core.models import ModelShape
    from longseq_bench.reports.document import Document


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
        lambda: _document(shapes),
        "--json has them",
    )


def _document(shapes: list[ModelShape]) -> Document:
    from longseq_bench.reports.columns import ValueColumn, build_table
    from longseq_bench.reports.document import Document, Section

    def v_head_dim(shape: Any) -> int | None:
        return shape.v_head_dim if shape.v_head_dim != shape.head_dim else None

    columns = [
        ValueColumn("Model", "text", lambda one: one.name),
        ValueColumn("Heads", "count", lambda one: one.heads, 9),
        ValueColumn("KV heads", "count", lambda one: one.kv_heads, 9),
        ValueColumn("Head dim", "count", lambda one: one.head_dim, 9),
        ValueColumn("V head dim", "count", v_head_dim, 8),
        ValueColumn("Layers", "count", lambda one: one.layers, 8),
        ValueColumn("Hidden", "count", lambda one: one.hidden_size, 4),
        ValueColumn("Dtype", "text", lambda one: one.dtype or "—", 6),
        ValueColumn("Parameters", "text", _parameters, 7),
        ValueColumn("Source", "text", lambda one: one.source, 5),
    ]
    notes = [f"{shape.name}: {note}" for shape in shapes for note in _notes(shape)]
    explanation = (
        "Parameters: matrices and embeddings by formula, without norms and biases. V head dim: of "
        "v and the output, where it is unlike that of q and k."
    )
    return Document(
        "models", "", [],
        [Section("", tables=[build_table("", columns, shapes)]), Section("", points=notes),
         Section("", [explanation])],
    )  # fmt: skip


def _parameters(shape: ModelShape) -> str:
    return f"{shape.parameters / 1e9:.1f} G" if shape.parameters else "—"


def _notes(shape: ModelShape) -> list[str]:
    return [*shape.notes, *([shape.parameters_reason] if shape.parameters_reason else [])]
