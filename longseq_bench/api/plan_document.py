"""The result of `plan`: the answer in a sentence, the table and the JSON of its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from longseq_bench.analysis.labels import mask_words, mode_words, settings_suffix
from longseq_bench.api.results import Printed
from longseq_bench.core.errors import UserError
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.model import Trial
from longseq_bench.core.units import MAX_RANKS, format_bytes, format_seconds, format_tokens
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Cell, Document, Section
from longseq_bench.search.model_memory import ModelPlan
from longseq_bench.search.prediction import Prediction

if TYPE_CHECKING:
    import pandas

TIE = 1.25
"""Predicted times within this factor are a tie: they may be wrong by as much."""

_EXPLANATION = (
    "Predicted; nothing was run. Tokens: the most that fit, or those of --target, of all ranks "
    "together. Peak and Sent: of the rank with most, per pass. Outside tensors: CUDA context, "
    "cuBLAS, NCCL. Exposed: time that communication adds to a pass. Length limited by: what "
    "ends the length; time limited by: what takes most of a pass."
)


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Printed):
    """Predictions for some implementations. Nothing was run.

    trials: what was asked, one for each implementation.
    results: for each trial a prediction, or the reason why there is none.
    hardware: the profile of the devices.  target: tokens to plan for; None: as many as fit.
    model: the model of the shape.
    """

    trials: Sequence[Trial]
    results: Sequence[Prediction | str]
    hardware: Hardware
    target: int | None = None
    model: ModelPlan | None = None

    @property
    def predictions(self) -> list[Prediction]:
        """The predictions, without the implementations that have none."""
        return [result for result in self.results if isinstance(result, Prediction)]

    @property
    def best(self) -> Prediction | None:
        """The prediction with the fewest ranks for a target, else with most tokens.

        The shorter time decides between equal ones. None: nothing fits.
        """
        fitting = [one for one in self.predictions if one.fits]
        return min(fitting, key=lambda one: (self._rank(one), one.times.total), default=None)

    @property
    def answer(self) -> str:
        """A sentence: how many devices (of a target) or tokens, which implementation, and why."""
        best, target, hardware = self.best, self.target, self.hardware
        if best is None:
            what = f"{format_tokens(target)} tokens" if target else "this shape"
            verb = "fits" if self.predictions else "can be predicted for"
            because = ""
            if self.predictions and self.model:
                rest = format_bytes(min(one.estimate.rest_bytes for one in self.predictions))
                because = f": the rest of the model takes {rest} of each rank; give more ranks"
            return f"No implementation {verb} {what}{because}."
        tokens, ranks = format_tokens(best.trial.workload.seq_len), best.trial.world_size
        devices = f"{ranks} {hardware.name}"
        head = f"{tokens} tokens: {devices}" if target else f"{devices}: {tokens} tokens"
        others = [one for one in self.predictions if one.fits and one != best]
        because = self._reason(best, others) if others else "nothing else fits"
        reason = f", because {because}" if len(self.results) > 1 else ""
        if model := self.model:
            kept = format_bytes(best.estimate.budget_bytes)
            whole = f" with {kept} on a rank" if model.shape.parameters else " without weights"
            head += f" in all {model.shape.layers} layers of {model.shape.name},{whole}"
            missing = "activations outside attention, logits"
        else:
            missing = "weights, other layers"
        missing = f"Not modelled: {missing}, fragmentation of the allocator."
        return f"{head}. Use {best.trial.implementation}{reason}. {missing}"

    def _rank(self, prediction: Prediction) -> int:
        return prediction.trial.world_size if self.target else -prediction.trial.workload.seq_len

    def _reason(self, best: Prediction, others: Sequence[Prediction]) -> str:
        equal = [one for one in others if self._rank(one) == self._rank(best)]
        if not equal:
            trial = min(others, key=self._rank).trial
            if self.target:
                return f"{trial.implementation} needs {trial.world_size} devices"
            tokens = format_tokens(trial.workload.seq_len)
            return f"the next longest, {trial.implementation}, ends at {tokens}"
        time, second = best.times.total, min(equal, key=lambda one: one.times.total)
        compared = f"{format_seconds(time)} a pass, {second.trial.implementation} "
        compared += format_seconds(second.times.total)
        if second.times.total <= TIE * time:
            return f"it is predicted to be the fastest, by less than the usual error ({compared})"
        return f"it is predicted to be the fastest ({compared})"

    def as_json(self) -> dict[str, Any]:
        """Return the document that `longseq plan --json` prints, in SI units."""
        model, pairs = self.model, zip(self.results, self.trials, strict=True)
        shape = model and model.shape.model_dump(mode="json") | {"sharding": model.sharding}
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
        w, budget = self.trials[0].workload, self.trials[0].memory_budget or 0
        heads = f"{w.heads} heads" if w.heads == w.kv_heads else f"{w.heads}/{w.kv_heads} heads"
        value = f" (v of {w.v_head_dim})" if w.v_head_dim != w.head_dim else ""
        context = [
            f"{self.hardware.name}, {format_bytes(budget)} a rank: "
            f"{mode_words(w.mode, w.new_tokens)}, {w.dtype}, "
            f"{mask_words(w.visibility.text)}, batch {w.batch}, {heads} of {w.head_dim}{value}"
        ]
        pairs = zip(self.results, self.trials, strict=True)
        notes = [note for result, asked in pairs for note in _notes(result, asked)]
        columns = _columns()
        if self.model is not None:
            columns = _with_model(columns, self.model, self.hardware.bandwidth)
            context.append(self.model.shape.describe(w))
            notes += _model_notes(self.model)
        tables = [build_table("", columns, self.predictions)] if self.predictions else []
        sections = [
            *([Section("Predictions", tables=tables)] if tables else []),
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
        best, ranks = self.best, trial.world_size
        if best and (may_grow or best.trial.world_size == ranks):
            return
        budget = format_bytes(trial.memory_budget or 0)
        problem = f"{tokens} tokens don't fit in {budget} on {ranks} rank(s)"
        if best is None:
            most = f"{max(ranks, MAX_RANKS):,}"
            raise UserError(f"{problem}; by prediction, up to {most} ranks are not enough")
        more = f"--world-size {best.trial.world_size}"
        raise UserError(f"{problem}; {best.trial.implementation} fits them with {more}")


# ---- the table ---------------------------------------------------------------------------------


def _columns() -> list[ValueColumn]:
    def tokens(prediction: Prediction) -> Cell:
        length = prediction.trial.workload.seq_len
        return length if prediction.fits else f"{format_tokens(length)} don't fit"

    return [
        ValueColumn("Implementation", "text", lambda one: _name(one.trial)),
        ValueColumn("Ranks", "count", lambda one: one.trial.world_size, 7),
        ValueColumn("Tokens", "tokens", tokens, 9),
        ValueColumn(
            "Fraction of floor", "share", lambda one: one.fraction_of_floor if one.fits else None, 4
        ),
        ValueColumn("Peak", "bytes", lambda one: one.estimate.peak_bytes, 8),
        ValueColumn("Outside tensors", "bytes", lambda one: one.estimate.outside_bytes or None, 4),
        ValueColumn("Time per pass", "seconds", lambda one: one.times.total, 8),
        ValueColumn("Sent", "bytes", lambda one: one.estimate.bytes_sent or None, 3),
        ValueColumn("Exposed", "seconds", lambda one: one.times.exposed or None, 2),
        ValueColumn(
            "Length limited by", "text", lambda one: one.length_limit and one.length_limit.name, 6
        ),
        ValueColumn("Time limited by", "text", lambda one: one.times.limit, 5),
    ]


def _with_model(
    columns: Sequence[ValueColumn], model: ModelPlan, bandwidth: float
) -> list[ValueColumn]:
    """Return columns of a whole model: the share of the floor of a layer says nothing then."""

    def part(name: str, heading: str = "") -> ValueColumn:
        def value(one: Prediction) -> int | None:
            found: int | None = getattr(model.memory(one.trial), name)
            return found

        return ValueColumn(heading or name.capitalize(), "bytes", value, 8)

    def step(one: Prediction) -> float | None:
        return model.step_seconds(one.trial, one.times.total, bandwidth)

    layers = model.shape.layers
    parts = [
        part("caches", f"Caches of {layers - 1} layers"),
        part("checkpoints", f"Checkpoints, {layers} layers"),
        *map(part, ("weights", "gradients", "optimizer")),
        ValueColumn("Sum", "bytes", lambda one: model.total(one.estimate), 9),
        ValueColumn("Time of a step", "seconds", step, 9),
    ]
    renamed = {"Peak": "Peak of one layer", "Time per pass": "Time per layer"}
    kept = [c for c in columns if c.heading != "Fraction of floor"]
    own = [replace(c, heading=renamed.get(c.heading, c.heading)) for c in kept]
    return [*own[:4], *parts, *own[4:]]


def _name(trial: Trial) -> str:
    return trial.implementation + settings_suffix(trial)


def _notes(prediction: Prediction | str, trial: Trial) -> list[str]:
    name = _name(trial)
    if isinstance(prediction, str):
        return [f"{name}: {prediction}"]
    estimate = prediction.estimate
    notes = [f"{name}: time from {prediction.rate.source}"]
    figure, best = prediction.rate.figure, prediction.rate.best
    is_auto, head_dim = trial.options.get("kernel") == "auto", trial.workload.head_dim
    is_better = is_auto and figure and best and best is not figure and best.head_dim == head_dim
    # those are packages; what torch has itself auto would have taken
    if figure and best and is_better and best.kernel.startswith("flash-attn-"):
        words = best.words(trial.workload.train)
        auto = f"kernel=auto is {figure.kernel} here; where its package is installed"
        notes.append(f"{name}: {auto}, -o kernel={best.kernel}: {words}")
    if (limit := prediction.length_limit) and limit.reason:
        free = format_bytes((prediction.trial.memory_budget or 0) - estimate.budget_bytes)
        notes.append(f"{name}: ends at {limit.name} with {free} of memory free: {limit.reason}")
    if prediction.trial.world_size != trial.world_size:
        ranks = prediction.trial.world_size
        notes.append(f"{name}: does not fit on {trial.world_size} rank(s); the row is for {ranks}")
    if estimate.host_bytes:
        pinned = " of pinned memory" if trial.device == "cuda" else ""
        notes.append(f"{name}: takes {format_bytes(estimate.host_bytes)}{pinned} on the host")
    if layouts := estimate.smaller_layouts:
        smaller = " and ".join(f"{n:,} tokens in blocks of {block:,}" for n, block in layouts)
        notes.append(f"{name}: extrapolated from the layouts of {smaller}")
    if kernels := ", ".join(estimate.untabled):
        notes.append(f"{name}: the workspace of {kernels} is unknown and not counted")
    return notes


def _model_notes(model: ModelPlan) -> list[str]:
    """Return what is counted."""
    counted = (
        f"Peak and Time per layer are of one layer's attention; caches, checkpoints, weights, "
        f"gradients and optimizer state of the published model are by formula; sharding "
        f"{model.sharding}; Sum has all of them. A step of decoding reads all caches and weights"
    )
    return [counted, *filter(None, [model.shape.parameters_reason])]


_COPIED = {"peak_bytes", "inside_bytes", "host_bytes", "kernel", "bytes_sent", "transfers"}


def _row(prediction: Prediction | str, trial: Trial, model: ModelPlan | None) -> dict[str, Any]:
    asked = {
        "implementation": trial.implementation,
        "options": trial.options,
        "keep": trial.keep,
        "workload": trial.workload.model_dump(mode="json", exclude={"seq_len"}),
        "asked_world_size": trial.world_size,
    }
    if isinstance(prediction, str):
        return asked | {"unsupported": prediction}
    limit, figure, estimate = prediction.length_limit, prediction.rate.figure, prediction.estimate
    found: dict[str, Any] = {
        "world_size": prediction.trial.world_size,
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
        "seconds": prediction.times.total,
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
        found["model_bytes"] = {
            **asdict(model.memory(prediction.trial)),
            "total": model.total(estimate),
        }
    return asked | found
