"""The part of a plan that is about a whole model: columns, sentences and JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from longseq_bench.core.models import ModelShape
from longseq_bench.core.units import format_bytes
from longseq_bench.reports.columns import ValueColumn
from longseq_bench.search.model_memory import ModelMemory, Sharding, model_memory
from longseq_bench.search.prediction import Prediction

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

    def columns(self) -> list[ValueColumn]:
        """Return a column for each part of the memory, and one for their sum."""

        def part(name: str) -> Callable[[Prediction], int | None]:
            return lambda one: getattr(self.memory(one), name)

        layers = f"{self.shape.layers} layers"
        return [
            ValueColumn(f"Checkpoints, {layers}", "bytes", part("checkpoints"), 8),
            ValueColumn("Weights", "bytes", part("weights"), 8),
            ValueColumn("Gradients", "bytes", part("gradients"), 8),
            ValueColumn("Optimizer", "bytes", part("optimizer"), 8),
            ValueColumn("Sum", "bytes", self.total, 8),
        ]

    def notes(self, results: list[Prediction], budget: int) -> list[str]:
        """Return what is counted, and which rows exceed the memory of a rank with all layers."""
        reason = self.shape.parameters_reason
        counted = (
            f"Tokens and Peak count the attention of one layer; checkpoints, weights, gradients "
            f"and optimizer state of the published model are by formula, for "
            f"{self.shape.layers} layers; {_SHARDING_WORDS[self.sharding]}; Sum has all of them"
        )
        over = [
            f"{one.trial.implementation}: with the whole model a rank needs {format_bytes(total)}, "
            f"more than its {format_bytes(budget)}; plan with --target for fewer tokens or with "
            f"more ranks"
            for one in results
            if one.fits and (total := self.total(one)) is not None and total > budget
        ]
        return [counted, *([reason] if reason else []), *over]

    def as_json(self) -> dict[str, Any]:
        """Return the model as data."""
        return self.shape.model_dump(mode="json") | {"sharding": self.sharding}

    def row_json(self, one: Prediction) -> dict[str, Any]:
        """Return the memory of the model on a rank as data, in bytes."""
        return {**asdict(self.memory(one)), "total": self.total(one)}
