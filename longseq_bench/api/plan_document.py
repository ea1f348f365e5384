"""The result of `plan`: the answer in a sentence, the table and the JSON of its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from longseq_bench.analysis.labels import mask_words, mode_words, settings_suffix
from longseq_bench.api.results import Printed
from longseq_bench.core.errors import UserError
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.model import Trial, Workload
from longseq_bench.core.units import MAX_RANKS, format_bytes, format_seconds, format_tokens
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Cell, Document, Section
from longseq_bench.search.model_memory import ModelPlan
from longseq_bench.search.prediction import Prediction

if TYPE_CHECKING:
    import pandas

TIE = 1.25
"""Predicted times within this factor are a tie: they may be wrong by as much."""
LENGTH_TIE = 1.02
"""Lengths within this factor are a tie."""

_EXPLANATION = (
    "Predicted; nothing was run. Bytes are those of the fullest rank, tokens those of all ranks. "
    "Outside tensors: CUDA context, cuBLAS, NCCL. Exposed: time that communication adds."
)


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Printed):
    """Predictions for some implementations. Nothing was run.

    trials: what was asked, one for each implementation.
    results: for each trial a prediction, or the reason why there is none.
    hardware: the profile of the devices.  workload: the asked one; with tensor parallelism a trial
    has the heads of one rank of it.  target: tokens to plan for; None: as many as fit.
    model: the model of the shape.
    """

    trials: Sequence[Trial]
    results: Sequence[Prediction | str]
    hardware: Hardware
    workload: Workload
    target: int | None = None
    model: ModelPlan | None = None

    @property
    def predictions(self) -> list[Prediction]:
        """The predictions, without the implementations that have none."""
        return [result for result in self.results if isinstance(result, Prediction)]

    @property
    def best(self) -> Prediction | None:
        """The prediction with the fewest ranks for a target, else with most tokens.

        Of equal ones those with a measured rate come first, then the shorter time decides. None:
        nothing fits.
        """
        fitting = self._equal([one for one in self.predictions if one.fits])
        return min(fitting, key=lambda one: (len(one.ends) > 1, one.times.total), default=None)

    @property
    def answer(self) -> str:
        """A sentence: how many devices (of a target) or tokens, which implementation, and why."""
        best, target = self.best, self.target
        if best is None:
            what = f"{format_tokens(target)} tokens" if target else "this shape"
            verb = "fits" if self.predictions else "can be predicted for"
            because = ""
            if self.predictions and self.model:
                rest = format_bytes(min(one.estimate.rest_bytes for one in self.predictions))
                because = f": the rest of the model takes {rest} of each rank; give more ranks"
            return f"No implementation {verb} {what}{because}."
        others = [one for one in self.predictions if one.fits and one != best]
        none = "nothing else fits" if self.predictions[1:] else "nothing else can run it"
        because = self._reason(best, others) if others else none
        reason = f", because {because}" if len(self.results) > 1 else ""
        return f"{self._head(best)}. Use {best.trial.implementation}{reason}."

    def _head(self, best: Prediction) -> str:
        """Return tokens and devices, of a model also the time of a step and what stays free."""
        tokens, model = format_tokens(best.tokens), self.model
        devices, length = f"{self.ranks(best)} {self.hardware.name}", f"{tokens} tokens"
        if best.alone:
            one = format_tokens(best.alone)
            length += f" for each of {best.trial.workload.batch} requests, {one} for one alone"
        head = f"{length}: {devices}" if self.target else f"{devices}: {length}"
        if model:
            head += f" with all {model.shape.layers} layers of {model.shape.name}"
            if seconds := _step_seconds(best, model, self.hardware.bandwidth):
                head += f"; a step takes {seconds}"
            elif seconds := _attention_seconds(best, model):
                head += f"; attention takes {seconds} of a step"
        if self.target:
            head += f"; {format_bytes(_headroom(best))} of a rank stay free"
        if best.fewest and best.fewest < best.trial.world_size:
            fewest = best.fewest * self._tp
            head += f", and {fewest} of them {'is' if fewest == 1 else 'are'} enough"
        return head

    @property
    def _tp(self) -> int:
        return self.model.tp if self.model else 1

    def ranks(self, prediction: Prediction) -> int:
        """Return the devices: tensor-parallel ranks, times those that share the tokens."""
        return prediction.trial.world_size * self._tp

    def _rank(self, prediction: Prediction) -> int:
        return prediction.trial.world_size if self.target else -prediction.tokens

    def _equal(self, fitting: Sequence[Prediction]) -> list[Prediction]:
        """Return those with the fewest ranks, or those that are about as long as the longest."""
        first = min(map(self._rank, fitting), default=0)
        tie = 1.0 if self.target else 1 / LENGTH_TIE
        return [one for one in fitting if self._rank(one) <= first * tie]

    def _reason(self, best: Prediction, others: Sequence[Prediction]) -> str:
        equal = [one for one in self._equal([best, *others]) if one is not best]
        if not equal:
            trial = min(others, key=self._rank).trial
            if self.target:
                return f"{trial.implementation} needs {trial.world_size * self._tp} devices"
            tokens = format_tokens(trial.workload.seq_len)
            return f"the next longest, {trial.implementation}, ends at {tokens}"
        measured = [one for one in equal if len(one.ends) == 1]
        if not measured:
            which = "no" if len(best.ends) > 1 else "only its"
            return f"others are about as long, and {which} rate is measured on this GPU"
        time, second = best.times.total, min(measured, key=lambda one: one.times.total)
        unit = "a layer's attention" if self.model else "a pass"
        compared = f"{format_seconds(time)} {unit}, {second.trial.implementation} "
        compared += format_seconds(second.times.total)
        if second.times.total <= TIE * time:
            return f"it is predicted to be the fastest, by less than the usual error ({compared})"
        return f"it is predicted to be the fastest ({compared})"

    def as_json(self) -> dict[str, Any]:
        """Return the document that `longseq plan --json` prints, in SI units."""
        model, pairs = self.model, zip(self.results, self.trials, strict=True)
        shape = model and model.shape.model_dump(mode="json") | {
            name: getattr(model, name) for name in ("sharding", "tp", "checkpoint", "prefill_chunk")
        }
        return {
            "schema": 1,
            "predicted": True,
            "answer": self.answer,
            "hardware": self.hardware.model_dump(mode="json"),
            "model": shape,
            "results": [_row(result, trial, model) for result, trial in pairs],
        }

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row per implementation; columns as in the JSON."""
        import pandas

        return pandas.DataFrame(self.as_json()["results"])

    def table(self) -> Document:
        """Return a row per implementation, and sentences on their assumptions."""
        w, budget = self.workload, self.trials[0].memory_budget or 0
        heads = f"{w.heads} heads" if w.heads == w.kv_heads else f"{w.heads}/{w.kv_heads} heads"
        value = f" (v of {w.v_head_dim})" if w.v_head_dim != w.head_dim else ""
        context = [
            f"{self.hardware.name}, {format_bytes(budget)} a rank: "
            f"{mode_words(w.mode, w.new_tokens, w.kv_dtype)}, {w.dtype}, "
            f"{mask_words(w.visibility.text)}, batch {w.batch}, {heads} of {w.head_dim}{value}"
            f"{', sinks' if w.sink else ''}"
        ]
        pairs = zip(self.results, self.trials, strict=True)
        names: dict[str, list[str]] = {}
        for result, asked in pairs:
            for note in _notes(result, asked, self._tp):
                names.setdefault(note, []).append(_name(asked))
        notes = [f"{', '.join(of_note)}: {note}" for note, of_note in names.items()]
        context += [self.model.shape.describe(w)] if self.model else []
        notes += _left_out(self.model, self.predictions)
        limit = self.model and self.model.shape.context
        if limit and self.best and self.best.tokens > limit:
            notes.append(f"beyond the model's own context (max_position_embeddings): {limit:,}")
        table = build_table("", _columns(self), self.predictions)
        sections = [
            *([Section("Predictions", tables=[table])] if table.rows else []),
            Section("Sources and assumptions", points=list(dict.fromkeys(notes))),
            Section("How to read it", [_EXPLANATION]),
        ]
        return Document("plan", "", [self.answer, *context], sections)

    def check_target(self, may_grow: bool = False) -> None:
        """Raise UserError if the target does not fit on the given ranks with any implementation.

        may_grow: the number of ranks is part of the answer, so more of them are no error.
        """
        if self.target is None:
            return
        tokens, trial = format_tokens(self.target), self.trials[0]
        if not self.predictions:
            raise UserError(f"{tokens} tokens: nothing could be predicted; {self.results[0]}")
        best, ranks = self.best, trial.world_size * self._tp
        if best and (may_grow or self.ranks(best) == ranks):
            return
        budget = format_bytes(trial.memory_budget or 0)
        problem = f"{tokens} tokens don't fit in {budget} on {ranks} rank(s)"
        if best is None:
            most = f"{max(ranks, MAX_RANKS):,}"
            raise UserError(f"{problem}; by prediction, up to {most} ranks are not enough")
        more = f"--world-size {self.ranks(best)}"
        raise UserError(f"{problem}; {best.trial.implementation} fits them with {more}")


# ---- the table ---------------------------------------------------------------------------------


def _headroom(prediction: Prediction) -> int:
    """Return the bytes of the budget that stay free on the fullest rank; negative if it is over."""
    return (prediction.trial.memory_budget or 0) - prediction.estimate.budget_bytes


def _seconds(prediction: Prediction, layers: int = 1) -> str:
    """Return the time of a pass over layers in words, or its range."""
    return " to ".join(format_seconds(layers * times.total) for times, _ in prediction.ends)


def _step_seconds(prediction: Prediction, model: ModelPlan, bandwidth: float) -> str | None:
    """Return the time of a step of decoding in words, or its range; None in other modes."""
    found = [
        model.step_seconds(prediction.trial, times.total, bandwidth * share)
        for times, share in prediction.ends
    ]
    return " to ".join(format_seconds(seconds) for seconds in found if seconds) or None


def _attention_seconds(prediction: Prediction, model: ModelPlan) -> str | None:
    """Return the time of attention in all layers of a pass; None unless all see all tokens."""
    kinds = [kind for kind in model.shape.kinds if kind.heads]
    if prediction.trial.workload.decode or len(kinds) != 1 or kinds[0].window:
        return None
    return _seconds(prediction, kinds[0].layers)


def _columns(plan: Plan) -> list[ValueColumn]:
    """Return the columns; of a whole model the share of the floor of one layer says nothing."""
    model, bandwidth = plan.model, plan.hardware.bandwidth
    of_layer = ", attention of a layer" if model else ""

    def tokens(prediction: Prediction) -> Cell:
        length = prediction.tokens
        return length if prediction.fits else f"{format_tokens(length)} don't fit"

    def share(one: Prediction) -> float | None:
        return one.fraction_of_floor if one.fits and not model else None

    return [
        ValueColumn("Implementation", "text", lambda one: _name(one.trial)),
        ValueColumn("Ranks", "count", plan.ranks, 5),
        ValueColumn("Tokens", "tokens", tokens, 9),
        ValueColumn("Tokens, one request", "tokens", lambda one: one.alone, 6),
        ValueColumn("Fraction of floor", "share", share, 4),
        ValueColumn(f"Peak{of_layer}", "bytes", lambda one: one.estimate.peak_bytes, 8),
        ValueColumn("Outside tensors", "bytes", lambda one: one.estimate.outside_bytes or None, 4),
        *(_model_columns(model, bandwidth) if model else ()),
        ValueColumn("Headroom", "bytes", _headroom, 5),
        ValueColumn("Time per pass" if not model else f"Time{of_layer}", "seconds", _seconds, 8),
        ValueColumn("Sent", "bytes", lambda one: one.estimate.bytes_sent or None, 3),
        ValueColumn("Exposed", "seconds", lambda one: one.times.exposed or None, 2),
        ValueColumn(
            "Length limited by", "text", lambda one: one.length_limit and one.length_limit.name, 6
        ),
        ValueColumn("Time limited by", "text", lambda one: one.times.limit, 5),
    ]


def _model_columns(model: ModelPlan, bandwidth: float) -> list[ValueColumn]:
    def part(name: str, heading: str = "") -> ValueColumn:
        words = heading or name.capitalize()
        return ValueColumn(words, "bytes", lambda one: getattr(model.memory(one.trial), name), 4)

    layers = f", {model.shape.layers - 1} layers"
    return [
        part("caches", f"Caches{layers}"),
        part("checkpoints", f"Checkpoints{layers}"),
        part("activations", "Other activations"),
        *map(part, ("logits", "weights", "gradients", "optimizer")),
        ValueColumn("Sum", "bytes", lambda one: model.total(one.estimate), 9),
        ValueColumn("Time of a step", "text", lambda one: _step_seconds(one, model, bandwidth), 9),
        ValueColumn(
            "Time, attention of all layers", "text", lambda one: _attention_seconds(one, model), 9
        ),
    ]


def _name(trial: Trial) -> str:
    return trial.implementation + settings_suffix(trial)


def _notes(prediction: Prediction | str, trial: Trial, tp: int) -> list[str]:
    if isinstance(prediction, str):
        return [prediction]
    estimate = prediction.estimate
    notes = [f"time from {prediction.rate.source}"]
    figure, best = prediction.rate.figure, prediction.rate.best
    is_auto, head_dim = trial.options.get("kernel") == "auto", trial.workload.head_dim
    is_better = is_auto and figure and best and best is not figure and best.head_dim == head_dim
    # those are packages; what torch has itself auto would have taken
    if figure and best and is_better and best.kernel.startswith("flash-attn-"):
        words = best.words(trial.workload.train)
        notes.append(f"where its package is installed, -o kernel={best.kernel}: {words}")
    if (limit := prediction.length_limit) and limit.reason:
        free = format_bytes(_headroom(prediction))
        notes.append(f"ends at {limit.name} with {free} of memory free: {limit.reason}")
    if prediction.trial.world_size != trial.world_size:
        ranks = prediction.trial.world_size * tp
        notes.append(f"does not fit on {trial.world_size * tp} rank(s); the row is for {ranks}")
    if estimate.host_bytes:
        pinned = " of pinned memory" if trial.device == "cuda" else ""
        notes.append(f"takes {format_bytes(estimate.host_bytes)}{pinned} on the host")
    if layouts := estimate.smaller_layouts:
        smaller = " and ".join(f"{n:,} tokens in blocks of {block:,}" for n, block in layouts)
        notes.append(f"extrapolated from the layouts of {smaller}")
    if kernels := ", ".join(estimate.untabled):
        notes.append(f"the workspace of {kernels} is unknown and not counted")
    return notes


def _left_out(model: ModelPlan | None, predictions: Sequence[Prediction]) -> list[str]:
    """Return notes on what is by formula, and what no column has."""
    if model is None:
        return ["not modelled: weights, other layers, fragmentation of the allocator"]
    shape, ranks = model.shape, max((one.trial.world_size for one in predictions), default=1)
    is_training = any(one.trial.workload.train for one in predictions)
    parts = {
        "weights": shape.parameters is None,
        "activations of the MLP": shape.mlp_width is None,
        "logits": shape.vocab_size is None,
        "copies of gathered weights": model.sharding == "zero3" and ranks > 1,
        "transfers between tensor-parallel ranks": model.tp > 1,
        "fragmentation of the allocator": True,
    }
    missing = [part for part, is_missing in parts.items() if is_missing]
    how = [f"sharding {model.sharding}, tp {model.tp}"] if ranks > 1 or model.tp > 1 else []
    if is_training:
        how.append(f"checkpoint {model.checkpoint}")
        missing += [] if model.checkpoint == "none" else ["recomputation, in the times"]
    counted = "all bytes but the peak and those outside tensors are by formula"
    counted += f"; {', '.join(how)}" if how else ""
    notes = [counted, f"not modelled: {', '.join(missing)}"]
    shares = [
        (model.memory(one.trial).logits or 0) / (one.trial.memory_budget or 1)
        for one in predictions
    ]
    if max(shares, default=0.0) > 1 / 4:
        notes.append("logits shrink with a loss over chunks of tokens (arXiv 2410.10989)")
    return [*notes, *filter(None, [shape.parameters_reason])]


_COPIED = {"peak_bytes", "inside_bytes", "host_bytes", "kernel", "bytes_sent", "transfers"}


def _row(prediction: Prediction | str, trial: Trial, model: ModelPlan | None) -> dict[str, Any]:
    tp = model.tp if model else 1
    asked = {
        "implementation": trial.implementation,
        "options": trial.options,
        "keep": trial.keep,
        "workload": trial.workload.model_dump(mode="json", exclude={"seq_len"}),
        "asked_world_size": trial.world_size * tp,
    }
    if isinstance(prediction, str):
        return asked | {"unsupported": prediction}
    limit, figure, estimate = prediction.length_limit, prediction.rate.figure, prediction.estimate
    found: dict[str, Any] = {
        "world_size": prediction.trial.world_size * tp,
        "tokens": prediction.trial.workload.seq_len,
        "fits": prediction.fits,
        "memory_budget": prediction.trial.memory_budget,
        "fraction_of_floor": prediction.fraction_of_floor,
        **estimate.model_dump(include=_COPIED),
        "extrapolated_from": [
            {"tokens": tokens, "block": block} for tokens, block in estimate.smaller_layouts
        ],
        "untabled": list(estimate.untabled),
        "outside_bytes": estimate.outside,
        "headroom_bytes": _headroom(prediction),
        "fewest_ranks": prediction.fewest and prediction.fewest * tp,
        "one_request_tokens": prediction.alone,
        "seconds": prediction.times.total,
        "seconds_range": [times.total for times, _ in prediction.ends],
        "compute_s": prediction.times.compute,
        "memory_s": prediction.times.memory,
        "communication_s": prediction.times.transfers,
        "exposed_s": prediction.times.exposed,
        "length_limit": limit and limit.name,
        "length_limit_reason": (limit and limit.reason) or None,
        "limit": prediction.times.limit,
        "rate_flops": prediction.rate.flops,
        "rate_source": prediction.rate.source,
        "rate_figure": figure and figure.model_dump(mode="json"),
    }
    if model is not None:
        parts = asdict(model.memory(prediction.trial))
        found["model_bytes"] = parts | {"total": model.total(estimate)}
    return asked | found
