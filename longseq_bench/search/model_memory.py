"""Memory of a whole model on one rank by formula: what a plan of one layer's attention leaves out.

Letters: L layers, P parameters, R ranks, b bytes per element.

checkpoints   the input of every layer, which training keeps and from which it recomputes the rest:
              batch · tokens / R · hidden size · b · L (arXiv 1604.06174)
weights       P · b
gradients     P · b, in training
optimizer     P · 12: Adam's float32 weights and two float32 moments (ZeRO, arXiv 1910.02054)

Sharding divides some of the last three by R, as the stages of ZeRO do. Activations within a layer
other than attention, logits, temporary copies of gathered weights and CUDA's context are left out.
"""

from dataclasses import dataclass

from longseq_bench.core.model import Workload
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.core.settings import Sharding
from longseq_bench.search.prediction import Prediction

ADAM_BYTES = 12
"""Bytes of Adam's state per parameter: weight, mean and variance, each float32."""

_SHARDED: dict[Sharding, tuple[str, ...]] = {
    "none": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "weights"),
}


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of a model on one rank; None: not needed in forward, or the parameters are unknown."""

    checkpoints: int | None
    weights: int | None
    gradients: int | None
    optimizer: int | None

    def total(self, attention: int) -> int | None:
        """Return all of them and the attention of one layer; None if the weights are unknown."""
        parts = (self.checkpoints, self.gradients, self.optimizer)
        if self.weights is None:
            return None
        return attention + self.weights + sum(part or 0 for part in parts)


def model_memory(
    model: ModelShape, workload: Workload, world_size: int, sharding: Sharding
) -> ModelMemory:
    """Return the memory of a model for a workload whose tokens are spread over all ranks."""
    w, parameters = workload, model.parameters

    def share(name: str, bytes_each: int) -> int | None:
        if parameters is None:
            return None
        ranks = world_size if name in _SHARDED[sharding] else 1
        return -(-parameters * bytes_each // ranks)

    weights = share("weights", w.dtype_bytes)
    if not w.train:
        return ModelMemory(None, weights, None, None)
    tokens = -(-w.batch * w.seq_len // world_size)
    return ModelMemory(
        tokens * model.hidden_size * w.dtype_bytes * model.layers,
        weights,
        share("gradients", w.dtype_bytes),
        share("optimizer", ADAM_BYTES),
    )


@dataclass(frozen=True)
class ModelPlan:
    """A model, and how its weights, gradients and optimizer state are split over the ranks."""

    shape: ModelShape
    sharding: Sharding

    def memory(self, prediction: Prediction) -> ModelMemory:
        """Return the memory of the model on a rank at the length of a prediction."""
        return model_memory(
            self.shape, prediction.trial.workload, prediction.trial.world_size, self.sharding
        )

    def total(self, prediction: Prediction) -> int | None:
        """Return the bytes of a rank with all layers; None if the weights are unknown."""
        return self.memory(prediction).total(
            prediction.estimate.peak_bytes + prediction.estimate.outside_bytes
        )
