"""Documents and JSON of plans: the answer, predictions, and errors of past predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from longseq_bench.analysis.labels import KEEP_WORDS, settings_suffix
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.masks import mask_words, mode_words
from longseq_bench.core.model import Trial
from longseq_bench.core.models import ModelShape
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Cell, Column, Document, Section, Table
from longseq_bench.search.model_memory import ModelMemory, Sharding, model_memory
from longseq_bench.search.prediction import Accuracy, Prediction

if TYPE_CHECKING:
    from longseq_bench.api.planning import Plan

TIE = 1.25
"""Predicted times within this factor are a tie: they may be wrong by as much."""

_NOT_MODELLED = "Not modelled: weights, other layers, fragmentation of the allocator."
_EXPLANATION = (
    "Predicted; nothing was run. Tokens: the most that fit, or those of --target, of all ranks "
    "together. Peak and Sent: of the rank with most, per pass. Outside tensors: CUDA context, "
    "cuBLAS, NCCL. Exposed: time that communication adds to a pass. Length limited by: what "
    "ends the length; time limited by: what takes most of a pass. Past error: median of predicted "
    "/ measured - 1 on this machine."
)
_SHARDING_WORDS: dict[Sharding, str] = {
    "none": "each rank has all of them",
    "zero1": "the optimizer state is split over all ranks (ZeRO-1)",
    "zero2": "gradients and optimizer state are split over all ranks (ZeRO-2)",
    "zero3": "weights, gradients and optimizer state are split over all ranks (ZeRO-3)",
}


@dataclass(frozen=True)
class ModelPlan:
    """The model of a plan, and how its weights, gradients and optimizer state are split."""

    shape: ModelShape
    sharding: Sharding

    def memory(self, one: Prediction) -> ModelMemory:
        """Return the memory of the model on a rank at the length of a prediction."""
        return model_memory(self.shape, one.trial.workload, one.trial.world_size, self.sharding)

    def total(self, one: Prediction) -> int | None:
        """Return the bytes of a rank with all layers; None if the weights are unknown."""
        return self.memory(one).total(one.estimate.peak_bytes + one.estimate.outside_bytes)


# ---- the answer --------------------------------------------------------------------------------


def find_best(results: Sequence[Prediction | str], target: int | None) -> Prediction | None:
    """Return the prediction with the fewest ranks for a target, else with most tokens.

    The shorter time decides between equal ones. None: nothing fits.
    """
    fitting = [one for one in results if isinstance(one, Prediction) and one.fits]
    return min(fitting, key=lambda one: (_rank(one, target), one.times.total), default=None)


def answer_sentence(
    results: Sequence[Prediction | str], hardware: Hardware, target: int | None, whole_nodes: bool
) -> str:
    """Return the answer to "how many devices" for a target, else to "how many tokens".

    results: a prediction for each implementation, or the reason why there is none.
    whole_nodes: devices are counted in nodes.
    """
    best = find_best(results, target)
    if best is None:
        what = f"{format_tokens(target)} tokens" if target else "this shape"
        return f"No implementation fits {what}."
    tokens, ranks = format_tokens(best.trial.workload.seq_len), best.trial.world_size
    devices = f"{ranks} {hardware.name}"
    if whole_nodes and ranks % hardware.per_node == 0:
        nodes = ranks // hardware.per_node
        devices = f"{nodes} node{'s' if nodes > 1 else ''} of {hardware.per_node} {hardware.name}"
    head = f"{tokens} tokens: {devices}" if target else f"{devices}: {tokens} tokens"
    others = [one for one in results if isinstance(one, Prediction) and one.fits and one != best]
    reason = ""
    if others:
        reason = f", because {_reason(best, others, target)}"
    elif len(results) > 1:
        reason = ", because nothing else fits"
    return f"{head}. Use {best.trial.implementation}{reason}. {_NOT_MODELLED}"


def _rank(one: Prediction, target: int | None) -> int:
    """Return what decides before time; the lower is better."""
    return one.trial.world_size if target else -one.trial.workload.seq_len


def _reason(best: Prediction, others: Sequence[Prediction], target: int | None) -> str:
    """Return why the best one is better than the others."""
    equal = [one for one in others if _rank(one, target) == _rank(best, target)]
    if not equal:
        next_best = min(others, key=lambda one: _rank(one, target))
        if target:
            return f"{next_best.trial.implementation} needs {next_best.trial.world_size} devices"
        tokens = format_tokens(next_best.trial.workload.seq_len)
        return f"the next longest, {next_best.trial.implementation}, ends at {tokens}"
    time, second = best.times.total, min(equal, key=lambda one: one.times.total)
    compared = f"{format_seconds(time)} a pass, {second.trial.implementation} "
    compared += format_seconds(second.times.total)
    if second.times.total <= TIE * time:
        return f"it is predicted to be the fastest, by less than the usual error ({compared})"
    return f"it is predicted to be the fastest ({compared})"


# ---- the document ------------------------------------------------------------------------------


def predictions_document(plan: Plan) -> Document:
    """Return a row per implementation, and sentences on their assumptions."""
    trial, w = plan.trials[0], plan.trials[0].workload
    budget = trial.memory_budget or 0
    heads = f"{w.heads} heads" if w.heads == w.kv_heads else f"{w.heads}/{w.kv_heads} heads"
    value = f" (v of {w.v_head_dim})" if w.v_head_dim != w.head_dim else ""
    context = [
        f"{plan.hardware.name}, {format_bytes(budget)} a rank: "
        f"{mode_words(w.mode, w.new_tokens)}, {w.dtype}, "
        f"{mask_words(w.visibility.text)}, batch {w.batch}, {heads} of {w.head_dim}{value}"
    ]
    notes = [
        note
        for result, asked in zip(plan.results, plan.trials, strict=True)
        for note in _notes(result, asked)
    ]
    columns = _columns(plan.accuracies)
    if plan.model is not None:
        columns[5:5] = _model_columns(plan.model)
        context.append(plan.model.shape.describe(w))
        notes += _model_notes(plan.model, plan.predictions, budget)
    tables = [build_table("", columns, plan.predictions)] if plan.predictions else []
    sections = [
        *([Section("Predictions", tables=tables)] if tables else []),
        Section("Sources and assumptions", points=list(dict.fromkeys(notes))),
        Section("How to read it", [_EXPLANATION]),
    ]
    return Document("plan", "", [plan.answer, *context], sections)


def _columns(accuracies: Sequence[Accuracy]) -> list[ValueColumn]:
    def tokens(one: Prediction) -> Cell:
        length = one.trial.workload.seq_len
        return length if one.fits else f"{format_tokens(length)} don't fit"

    def past_error(one: Prediction) -> Cell:
        past = next((a for a in accuracies if a.matches(one.trial)), None)
        return past and f"{_median(past.memory_errors)}, {_median(past.time_errors)}"

    def sent(one: Prediction) -> Cell:
        return one.estimate.bytes_sent if one.trial.world_size > 1 else None

    def exposed(one: Prediction) -> Cell:
        return one.times.exposed if one.trial.world_size > 1 else None

    def share_of_floor(one: Prediction) -> Cell:
        return one.fraction_of_floor if one.fits else None

    return [
        ValueColumn("Implementation", "text", lambda one: _name(one.trial)),
        ValueColumn("Ranks", "count", lambda one: one.trial.world_size, 7),
        ValueColumn("Tokens", "tokens", tokens, 9),
        ValueColumn("Fraction of floor", "share", share_of_floor, 4),
        ValueColumn("Peak", "bytes", lambda one: one.estimate.peak_bytes, 8),
        ValueColumn("Outside tensors", "bytes", lambda one: one.estimate.outside_bytes or None, 4),
        ValueColumn("Time per pass", "seconds", lambda one: one.times.total, 8),
        ValueColumn("Sent", "bytes", sent, 3),
        ValueColumn("Exposed", "seconds", exposed, 2),
        ValueColumn("Length limited by", "text", _length_limit, 6),
        ValueColumn("Time limited by", "text", lambda one: one.times.limit, 5),
        ValueColumn("Past error, memory and time", "text", past_error, 1),
    ]


def _model_columns(model: ModelPlan) -> list[ValueColumn]:
    """Return a column for each part of the memory of a model, and one for their sum."""

    def part(heading: str, name: str) -> ValueColumn:
        return ValueColumn(heading, "bytes", lambda one: getattr(model.memory(one), name), 8)

    return [
        part(f"Checkpoints, {model.shape.layers} layers", "checkpoints"),
        part("Weights", "weights"),
        part("Gradients", "gradients"),
        part("Optimizer", "optimizer"),
        ValueColumn("Sum", "bytes", model.total, 8),
    ]


def _name(trial: Trial) -> str:
    return trial.implementation + settings_suffix(trial)


def _length_limit(one: Prediction) -> str | None:
    return one.length_limit and one.length_limit.name


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


def _model_notes(model: ModelPlan, results: Sequence[Prediction], budget: int) -> list[str]:
    """Return what is counted, and which rows exceed the memory of a rank with all layers."""
    counted = (
        f"Tokens and Peak count the attention of one layer; checkpoints, weights, gradients "
        f"and optimizer state of the published model are by formula, for "
        f"{model.shape.layers} layers; {_SHARDING_WORDS[model.sharding]}; Sum has all of them"
    )
    over = [
        f"{one.trial.implementation}: with the whole model a rank needs {format_bytes(total)}, "
        f"more than its {format_bytes(budget)}; plan with --target for fewer tokens or with "
        f"more ranks"
        for one in results
        if one.fits and (total := model.total(one)) is not None and total > budget
    ]
    return [counted, *filter(None, [model.shape.parameters_reason]), *over]


# ---- JSON --------------------------------------------------------------------------------------


def predictions_json(plan: Plan) -> dict[str, Any]:
    """Return the predictions as data, in SI units."""
    model, pairs = plan.model, zip(plan.results, plan.trials, strict=True)
    shape = model.shape.model_dump(mode="json") | {"sharding": model.sharding} if model else None
    return {
        "schema": 1,
        "predicted": True,
        "answer": plan.answer,
        "hardware": plan.hardware.model_dump(mode="json"),
        "model": shape,
        "results": [_row(result, trial, model) for result, trial in pairs],
        "accuracy": [accuracy._asdict() for accuracy in plan.accuracies],
    }


def _row(one: Prediction | str, trial: Trial, model: ModelPlan | None) -> dict[str, Any]:
    asked = {
        "implementation": trial.implementation,
        "options": trial.options,
        "keep": trial.keep,
        "workload": trial.workload.model_dump(mode="json", exclude={"seq_len"}),
        "asked_world_size": trial.world_size,
    }
    if isinstance(one, str):
        return asked | {"unsupported": one}
    limit = one.length_limit
    found: dict[str, Any] = {
        "world_size": one.trial.world_size,
        "tokens": one.trial.workload.seq_len,
        "fits": one.fits,
        "memory_budget": one.trial.memory_budget,
        "fraction_of_floor": one.fraction_of_floor,
        "peak_bytes": one.estimate.peak_bytes,
        "inside_bytes": one.estimate.inside_bytes,
        "host_bytes": one.estimate.host_bytes,
        "extrapolated_from": [
            {"tokens": tokens, "block": block} for tokens, block in one.estimate.smaller_layouts
        ],
        "untabled": list(one.estimate.untabled),
        "outside_bytes": one.estimate.outside,
        "kernel": one.estimate.kernel,
        "seconds": one.times.total,
        "compute_s": one.times.compute,
        "memory_s": one.times.memory,
        "bytes_sent": one.estimate.bytes_sent,
        "transfers": one.estimate.transfers,
        "communication_s": one.times.transfers,
        "exposed_s": one.times.exposed,
        "length_limit": limit and limit.name,
        "length_limit_reason": (limit and limit.reason) or None,
        "limit": one.times.limit,
        "rate_flops": one.rate.flops,
        "rate_source": one.rate.source,
    }
    if model is not None:
        found["model_bytes"] = {**asdict(model.memory(one)), "total": model.total(one)}
    return asked | found


# ---- errors of past predictions ----------------------------------------------------------------


def accuracy_document(accuracies: Sequence[Accuracy]) -> Document:
    """Return the errors of past predictions."""

    def largest(errors: Sequence[float]) -> str:
        return f"{100 * max(errors, key=abs):+.1f} %" if errors else "—"

    named = ("Past predictions", "Mode", "Dtype", "Ranks", "Runs", "Memory error", "Time error")
    names = (*named, "Largest memory error", "Largest time error", "Missed")
    columns = tuple(Column(name, "text" if i < 3 else "count") for i, name in enumerate(names))
    rows: list[tuple[Cell, ...]] = []
    for one in accuracies:
        kept = f" ({KEEP_WORDS[one.keep]})" if one.keep in KEEP_WORDS else ""
        place = "" if one.device == "cpu" else f" on {one.device}"
        runs = max(len(one.memory_errors), len(one.time_errors))
        row = (f"{one.implementation}{kept}{place}", one.mode, one.dtype, one.world_size, runs)
        errors = one.memory_errors, one.time_errors
        rows.append((*row, *map(_median, errors), *map(largest, errors), one.missed))
    explanation = (
        "Errors: predicted / measured - 1, median and largest. "
        "Missed: runs that were predicted to fit but ran out of memory."
    )
    tables = [Table("", columns, tuple(rows))]
    return Document("accuracy", "", [], [Section("", tables=tables), Section("", [explanation])])


def _median(errors: Sequence[float]) -> str:
    return f"{100 * median(errors):+.1f} %" if errors else "—"
