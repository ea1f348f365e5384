"""Memory of a whole model on one rank by formula: what a plan of one layer's attention leaves out.

One layer is the trial's: its peak is that of a dry run. The rest is here.
Letters: L layers, P parameters, R ranks, b bytes per element.

caches        decoding: k and v of the other layers, of each kind with its own heads and window
checkpoints   the input of every layer, which training keeps and from which it recomputes the rest:
              batch · tokens / R · hidden size · b · L (arXiv 1604.06174)
weights       P · b
gradients     P · b, in training
optimizer     P · 12: Adam's float32 weights and two float32 moments (ZeRO, arXiv 1910.02054)

Sharding divides some of the last three by R, as the stages of ZeRO do. Activations within a layer
other than attention, logits, temporary copies of gathered weights and CUDA's context are left out.
"""

from dataclasses import dataclass

from longseq_bench.core.model import DryRunEstimate, Trial, Workload
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.core.settings import Sharding

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
    """Bytes of a model on a rank; None: not needed in this mode, or parameters are unknown."""

    caches: int | None
    checkpoints: int | None
    weights: int | None
    gradients: int | None
    optimizer: int | None

    @property
    def known(self) -> int:
        """All of them that are known."""
        return sum(part or 0 for part in vars(self).values())


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
        caches = -(-_cached_bytes(model, w) // world_size) if w.decode else None
        return ModelMemory(caches, None, weights, None, None)
    tokens = -(-w.batch * w.seq_len // world_size)
    return ModelMemory(
        None,
        tokens * model.hidden_size * w.dtype_bytes * model.layers,
        weights,
        share("gradients", w.dtype_bytes),
        share("optimizer", ADAM_BYTES),
    )


def _cached_bytes(model: ModelShape, w: Workload) -> int:
    """Return the bytes of k and v in all layers but the trial's, one of the first kind."""
    others = [(kind, kind.layers - (kind is model.kinds[0])) for kind in model.kinds]
    elements = sum(
        layers * kind.kv_heads * (kind.head_dim + kind.v_head_dim)
        * min(w.seq_len, kind.window or w.seq_len)
        for kind, layers in others
    )  # fmt: skip
    return w.batch * elements * w.dtype_bytes


@dataclass(frozen=True)
class ModelPlan:
    """A model, and how its weights, gradients and optimizer state are split over the ranks."""

    shape: ModelShape
    sharding: Sharding

    def memory(self, trial: Trial) -> ModelMemory:
        """Return the memory of the model on a rank, without the layer of the trial."""
        return model_memory(self.shape, trial.workload, trial.world_size, self.sharding)

    def total(self, estimate: DryRunEstimate) -> int | None:
        """Return the bytes of a rank with all layers; None if the weights are unknown."""
        return estimate.budget_bytes if self.shape.parameters else None

    def step_seconds(self, trial: Trial, layer_s: float, bandwidth: float) -> float | None:
        """Return the time of a step of decoding, which reads all caches and weights, or None.

        layer_s: the time of the trial's layer.  bandwidth: bytes/s of the device's memory.
        """
        memory = self.memory(trial)
        if memory.caches is None or memory.weights is None:
            return None
        return layer_s + (memory.caches + memory.weights) / bandwidth
