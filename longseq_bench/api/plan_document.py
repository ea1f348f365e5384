"""Documents and JSON of plans: predictions, and errors of past predictions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from longseq_bench.analysis.labels import KEEP_WORDS, settings_suffix
from longseq_bench.api.plan_model import ModelPlan
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.masks import mask_words, mode_words
from longseq_bench.core.model import Trial
from longseq_bench.core.units import format_bytes, format_tokens
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Cell, Document, Section
from longseq_bench.search.prediction import Accuracy, Prediction

_EXPLANATION = (
    "Predicted; nothing was run. Tokens: the most that fit, or those of --target, of all ranks "
    "together. Peak and Sent: of the rank with most, per pass. Outside tensors: CUDA context, "
    "cuBLAS, NCCL. Exposed: time that communication adds to a pass. Length limited by: what "
    "ends the length; time limited by: what takes most of a pass. Past error: median of predicted "
    "/ measured - 1 on this machine."
)


def predictions_document(
    results: Sequence[Prediction | str], trials: Sequence[Trial], hardware: Hardware,
    accuracies: Sequence[Accuracy], answer: str, model: ModelPlan | None = None,
) -> Document:  # fmt: skip
    """Return a row per implementation, and sentences on their assumptions.

    results: per trial a prediction, or the reason why there is none.
    accuracies: errors of past predictions.  answer: the first sentence.  model: the model that the
    shape is from.
    """
    rows = [result for result in results if isinstance(result, Prediction)]
    notes = dict.fromkeys(
        note
        for result, trial in zip(results, trials, strict=True)
        for note in _notes(result, trial)
    )
    columns, context = _columns(accuracies), [_context(trials[0], hardware)]
    if model is not None:
        columns[5:5] = model.columns()
        context.append(model.shape.describe(trials[0].workload))
        notes |= dict.fromkeys(model.notes(rows, trials[0].memory_budget or 0))
    tables = [build_table("", columns, rows)] if rows else []
    sections = [
        *([Section("", tables=tables)] if tables else []),
        Section("", points=list(notes)),
        Section("", [_EXPLANATION]),
    ]
    return Document("plan", "", [answer, *context], sections)


def with_titles(document: Document) -> Document:
    """Return the document of predictions with the titles that a file needs."""
    titles = ("Predictions", "Sources and assumptions", "How to read it")[-len(document.sections) :]
    sections = [
        replace(section, title=title)
        for section, title in zip(document.sections, titles, strict=True)
    ]
    return replace(document, title="Plan", sections=sections)


def predictions_json(
    results: Sequence[Prediction | str], trials: Sequence[Trial], hardware: Hardware,
    accuracies: Sequence[Accuracy], answer: str, model: ModelPlan | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the predictions as data, in SI units."""
    rows = [_row(result, trial) for result, trial in zip(results, trials, strict=True)]
    for row, result in zip(rows, results, strict=True):
        if model is not None and isinstance(result, Prediction):
            row["model_bytes"] = model.row_json(result)
    return {
        "schema": 1,
        "predicted": True,
        "answer": answer,
        "hardware": hardware.model_dump(mode="json"),
        "model": model.as_json() if model is not None else None,
        "results": rows,
        "accuracy": [accuracy._asdict() for accuracy in accuracies],
    }


def accuracy_document(accuracies: Sequence[Accuracy]) -> Document:
    """Return the errors of past predictions."""
    table = build_table("", _ACCURACY_COLUMNS, accuracies)
    explanation = (
        "Errors: predicted / measured - 1, median and largest. "
        "Missed: runs that were predicted to fit but ran out of memory."
    )
    sections = [Section("", tables=[table]), Section("", [explanation])]
    return Document("accuracy", "", [], sections)


def accuracy_json(accuracies: Sequence[Accuracy]) -> dict[str, Any]:
    """Return the errors of past predictions as data."""
    return {"schema": 1, "accuracy": [accuracy._asdict() for accuracy in accuracies]}


def _context(trial: Trial, hardware: Hardware) -> str:
    w = trial.workload
    heads = f"{w.heads} heads" if w.heads == w.kv_heads else f"{w.heads}/{w.kv_heads} heads"
    value = f" (v of {w.v_head_dim})" if w.v_head_dim != w.head_dim else ""
    return (
        f"{hardware.name}, {format_bytes(trial.memory_budget or 0)} a rank: "
        f"{mode_words(w.mode, w.new_tokens)}, {w.dtype}, "
        f"{mask_words(w.visibility.text)}, batch {w.batch}, {heads} of {w.head_dim}{value}"
    )


def _name(trial: Trial) -> str:
    return trial.implementation + settings_suffix(trial)


def _columns(accuracies: Sequence[Accuracy]) -> list[ValueColumn]:
    def if_several_ranks(value: Callable[[Prediction], Cell]) -> Callable[[Prediction], Cell]:
        return lambda one: value(one) if one.trial.world_size > 1 else None

    def past_error(one: Prediction) -> Cell:
        past = next((a for a in accuracies if a.matches(one.trial)), None)
        return past and f"{_median(past.memory_errors)}, {_median(past.time_errors)}"

    return [
        ValueColumn("Implementation", "text", lambda one: _name(one.trial)),
        ValueColumn("Ranks", "count", lambda one: one.trial.world_size, 7),
        ValueColumn("Tokens", "tokens", _tokens, 9),
        ValueColumn(
            "Fraction of floor", "share", lambda one: one.fraction_of_floor if one.fits else None, 4
        ),
        ValueColumn("Peak", "bytes", lambda one: one.estimate.peak_bytes, 8),
        ValueColumn("Outside tensors", "bytes", _outside, 4),
        ValueColumn("Time per pass", "seconds", lambda one: one.times.total, 8),
        ValueColumn("Sent", "bytes", if_several_ranks(lambda one: one.estimate.bytes_sent), 3),
        ValueColumn("Exposed", "seconds", if_several_ranks(lambda one: one.times.exposed), 2),
        ValueColumn("Length limited by", "text", _length_limit, 6),
        ValueColumn("Time limited by", "text", lambda one: one.times.limit, 5),
        ValueColumn("Past error, memory and time", "text", past_error, 1),
    ]


def _tokens(one: Prediction) -> Cell:
    tokens = one.trial.workload.seq_len
    return tokens if one.fits else f"{format_tokens(tokens)} don't fit"


def _length_limit(one: Prediction) -> Cell:
    return one.length_limit and one.length_limit.name


def _outside(one: Prediction) -> Cell:
    return one.estimate.outside_bytes or None


def _name_kind(one: Accuracy) -> str:
    name = one.implementation + (f" ({KEEP_WORDS[one.keep]})" if one.keep in KEEP_WORDS else "")
    return name if one.device == "cpu" else f"{name} on {one.device}"


_ACCURACY_COLUMNS = (
    ValueColumn("Past predictions", "text", _name_kind),
    ValueColumn("Mode", "text", lambda one: one.mode),
    ValueColumn("Dtype", "text", lambda one: one.dtype),
    ValueColumn("Ranks", "count", lambda one: one.world_size, 2),
    ValueColumn("Runs", "count", lambda one: max(len(one.memory_errors), len(one.time_errors)), 2),
    ValueColumn("Memory error", "count", lambda one: _median(one.memory_errors), 3),
    ValueColumn("Largest memory error", "count", lambda one: _largest(one.memory_errors), 1),
    ValueColumn("Time error", "count", lambda one: _median(one.time_errors), 3),
    ValueColumn("Largest time error", "count", lambda one: _largest(one.time_errors), 1),
    ValueColumn("Missed", "count", lambda one: one.missed, 2),
)


def _median(errors: Sequence[float]) -> str:
    return f"{100 * median(errors):+.1f} %" if errors else "—"


def _largest(errors: Sequence[float]) -> str:
    return f"{100 * max(errors, key=abs):+.1f} %" if errors else "—"


def _notes(one: Prediction | str, trial: Trial) -> list[str]:
    name = _name(trial)
    if isinstance(one, str):
        return [f"{name}: {one}"]
    notes = [f"{name}: time from {one.rate.source}"]
    if one.length_limit and one.length_limit.reason:
        free = (one.trial.memory_budget or 0) - one.estimate.peak_bytes - one.estimate.outside_bytes
        notes.append(
            f"{name}: ends at {one.length_limit.name} with {format_bytes(free)} of memory free: "
            f"{one.length_limit.reason}"
        )
    if one.trial.world_size != trial.world_size:
        ranks = one.trial.world_size
        notes.append(f"{name}: does not fit on {trial.world_size} rank(s); the row is for {ranks}")
    if one.estimate.host_bytes:
        pinned = " of pinned memory" if one.trial.device == "cuda" else ""
        notes.append(f"{name}: takes {format_bytes(one.estimate.host_bytes)}{pinned} on the host")
    if layouts := one.estimate.smaller_layouts:
        smaller = " and ".join(f"{n:,} tokens in blocks of {block:,}" for n, block in layouts)
        notes.append(f"{name}: extrapolated from the layouts of {smaller}")
    if one.estimate.untabled:
        kernels = ", ".join(one.estimate.untabled)
        notes.append(f"{name}: the workspace of {kernels} is unknown and not counted")
    return notes


def _row(one: Prediction | str, trial: Trial) -> dict[str, Any]:
    row = {
        "implementation": trial.implementation, "options": trial.options, "keep": trial.keep,
        "workload": trial.workload.model_dump(mode="json", exclude={"seq_len"}),
        "asked_world_size": trial.world_size,
    }  # fmt: skip
    if isinstance(one, str):
        return row | {"unsupported": one}
    return row | {
        "world_size": one.trial.world_size, "tokens": one.trial.workload.seq_len,
        "fits": one.fits, "memory_budget": one.trial.memory_budget,
        "fraction_of_floor": one.fraction_of_floor, "peak_bytes": one.estimate.peak_bytes,
        "inside_bytes": one.estimate.inside_bytes, "host_bytes": one.estimate.host_bytes,
        "extrapolated_from": [
            {"tokens": tokens, "block": block} for tokens, block in one.estimate.smaller_layouts
        ],
        "untabled": list(one.estimate.untabled), "outside_bytes": one.estimate.outside,
        "kernel": one.estimate.kernel,
        "seconds": one.times.total, "compute_s": one.times.compute, "memory_s": one.times.memory,
        "bytes_sent": one.estimate.bytes_sent, "transfers": one.estimate.transfers,
        "communication_s": one.times.transfers, "exposed_s": one.times.exposed,
        "length_limit": one.length_limit and one.length_limit.name,
        "length_limit_reason": (one.length_limit and one.length_limit.reason) or None,
        "limit": one.times.limit, "rate_flops": one.rate.flops, "rate_source": one.rate.source,
    }  # fmt: skip
