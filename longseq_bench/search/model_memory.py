"""Memory of a whole model on one rank by formula: what a plan of one layer's attention leaves out.

The attention of one layer is the trial's: its peak is that of a dry run. The rest is here.
Letters: L layers, P parameters, R ranks that share the tokens, t tensor-parallel ranks, h hidden
size, w width of the MLP, b bytes per element, n tokens of a rank: batch · tokens / R; a elements of
a token in q, k, v and the output.

caches        decoding: k, v, scales of other layers, of each kind with its own heads and window, or
              the latent (arXiv 2405.04434); KV heads are split over t, or copied if there are fewer
activations   decoding and forward: n · b · (2 h + max(3 w, a) / t): a residual, a hidden state, and
              gate, up and their product or those of attention, whichever are more; and the logits
              of the last token. n is a chunk of the prefill, as in vLLM's profile run of
              max_num_batched_tokens (GPUModelRunner.profile_run).
              training: n · b · (4 h + 4 w) / t: the MLP and the norms of the layer that is computed
checkpoints   what training keeps of the other layers, times (L - 1) / t (below)
logits        training: n · V / t · (b + 4) for a vocabulary V: a copy in float32 for the loss
weights       P / t · b, and the projections of copied KV heads
gradients     P / t · b, in training
optimizer     P / t · 12: Adam's float32 weights and two float32 moments (ZeRO, arXiv 1910.02054)

Checkpoints are those of Korthikanti et al. (arXiv 2205.05198) with sequence parallelism, which
splits them over t; with SwiGLU, without dropout, and with kernels that keep no scores.
full: n · b · h, the input of a layer (arXiv 1604.06174).
none: n · (b · (4 h + 4 w + a) + 4 heads): inputs of both norms, of q, k, v and of the MLP; gate,
up, activation and product; a; the log-sum-exp.
selective: the same without the log-sum-exp, as attention is recomputed from q, k, v.

Sharding divides some of the last three by R, as the stages of ZeRO do. The activations of one layer
and the peak of its attention are added, an upper bound: they are not all held at once. Without a
width or a vocabulary their parts are left out.
"""

from dataclasses import dataclass

from longseq_bench.core.cost import LSE_BYTES, scale_bytes
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import DTYPE_BYTES, DryRunEstimate, Trial, Workload
from longseq_bench.core.model_files import LayerKind, split_kv_heads
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.core.settings import Checkpoint, Sharding

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

    caches: int | None = None
    activations: int | None = None
    checkpoints: int | None = None
    logits: int | None = None
    weights: int | None = None
    gradients: int | None = None
    optimizer: int | None = None

    @property
    def known(self) -> int:
        """All of them that are known."""
        return sum(part or 0 for part in vars(self).values())


@dataclass(frozen=True)
class ModelPlan:
    """A model, and how it is split over the ranks.

    sharding: of weights, gradients and optimizer state.  tp: tensor-parallel ranks; a trial has the
    heads of one of them.  checkpoint: what training keeps.  prefill_chunk: tokens of a prefill.
    """

    shape: ModelShape
    sharding: Sharding = "zero3"
    tp: int = 1
    checkpoint: Checkpoint = "full"
    prefill_chunk: int = 0

    def split(self, workload: Workload) -> Workload:
        """Return the workload of a tensor-parallel rank. Raises UserError if heads can't be split.

        A latent is on every rank.
        """
        shapes = [
            (workload.heads, workload.kv_heads),
            *((k.heads, k.kv_heads) for k in self._kinds),
        ]
        for heads, kv_heads in shapes:
            if heads % self.tp or (kv_heads % self.tp and self.tp % kv_heads):
                raise UserError(
                    f"--tp {self.tp} can't split {heads} query heads and {kv_heads} KV heads; "
                    f"give a divisor of {heads} that divides {kv_heads}, or is a multiple of it"
                )
        kv_heads = split_kv_heads(workload.kv_heads, self.tp)
        fields = {"heads": workload.heads // self.tp, "kv_heads": kv_heads}
        return workload.model_copy(update=fields)

    def memory(self, trial: Trial) -> ModelMemory:
        """Return the memory of the model on a rank, without the attention of the trial's layer."""
        w, ranks, shape = trial.workload, trial.world_size, self.shape
        b, hidden, mlp = w.dtype_bytes, shape.hidden_size, shape.mlp_width or 0
        tokens, others = -(-w.batch * w.seq_len // ranks), shape.layers - 1
        attention = (w.heads + w.kv_heads) * (w.head_dim + w.v_head_dim)
        logits = (b + DTYPE_BYTES["float32"]) * (shape.vocab_size or 0)
        weights = self._parameter_bytes("weights", b, ranks)
        if not w.train:
            if w.decode:
                tokens = max(w.batch * w.new_tokens, -(-self.prefill_chunk // ranks))
            a_token = b * (2 * hidden + max(-(-3 * mlp // self.tp), attention))
            caches = -(-self._cached_bytes(w) // ranks) if w.decode else None
            return ModelMemory(caches, tokens * a_token + w.batch * logits, weights=weights)
        of_layer = b * -(-4 * (hidden + mlp) // self.tp)
        kept = {
            "full": b * -(-hidden // self.tp),
            "selective": of_layer + b * attention,
            "none": of_layer + b * attention + LSE_BYTES * w.heads,
        }
        return ModelMemory(
            activations=tokens * of_layer,
            checkpoints=tokens * kept[self.checkpoint] * others,
            logits=tokens * -(-logits // self.tp),
            weights=weights,
            gradients=self._parameter_bytes("gradients", b, ranks),
            optimizer=self._parameter_bytes("optimizer", ADAM_BYTES, ranks),
        )

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

    @property
    def _kinds(self) -> list[LayerKind]:
        return [kind for kind in self.shape.kinds if kind.heads]

    def _cached_bytes(self, w: Workload) -> int:
        """Return the bytes of k and v in all layers but the trial's, one of the first kind."""
        total, each = 0, 1 if w.kv_dtype else w.dtype_bytes
        for kind in self.shape.kinds:
            tokens = min(w.seq_len, kind.window or w.seq_len)
            elements = kind.cached_elements(self.tp)
            heads = elements // max(1, kind.head_dim + kind.v_head_dim)
            scales = scale_bytes(w, tokens) // w.kv_heads * heads
            others = kind.layers - (kind is self.shape.kinds[0])
            total += others * (w.batch * elements * tokens * each + scales)
        return total

    def _parameter_bytes(self, name: str, bytes_each: int, ranks: int) -> int | None:
        """Return the bytes of something that each parameter has; None if they aren't counted."""
        if self.shape.parameters is None:
            return None
        # t ranks keep more KV heads than there are
        copied = sum(
            kind.layers * (split_kv_heads(kind.kv_heads, self.tp) * self.tp - kind.kv_heads)
            * self.shape.hidden_size * (kind.head_dim + kind.v_head_dim)
            for kind in self._kinds
        )  # fmt: skip
        sharing = self.tp * (ranks if name in _SHARDED[self.sharding] else 1)
        return -(-(self.shape.parameters + copied) * bytes_each // sharing)
