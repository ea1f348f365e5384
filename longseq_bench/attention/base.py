"""The contract of an attention implementation.

An implementation is a class, registered by name. Its options are its keyword-only parameters,
annotated `Annotated[type, "help"]`. Other packages register theirs through the
entry-point group `longseq_bench.implementations`; the name of the entry is the name of the
implementation.

Shapes: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim, Dv v_head_dim (D unless the workload
says otherwise), each of them this rank's share.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.cost import (
    attention_flops,
    floor_bytes,
    key_bytes_per_token,
    mask_pairs,
    scale_bytes,
)
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import DType, Workload
from longseq_bench.core.registry import Registry
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Positions, Shard, TokenOrder, count_tokens
from longseq_bench.kernels.base import AttentionKernel, Triple, attend
from longseq_bench.kernels.exact.base import AUTO, ExactKernel, Use, check_name, select
from longseq_bench.kernels.sinks import SinkKernel
from longseq_bench.meta_mode import device_for
from longseq_bench.patterns.visible_keys import visible_keys

Counts = NDArray[np.integer] | NDArray[np.bool_]


@dataclass(frozen=True)
class Cost:
    """Cost of a pass by formula: FLOPs, floor bytes, and bytes that a rank sends."""

    flops: float
    floor_bytes: int
    bytes_sent: int = 0


class Attention(ABC):
    """One way to compute attention, for one workload, on one rank of a group.

    A subclass overrides `build_kernel`, or `__call__` if it has no kernel. `workload` is the
    workload of all ranks together, `shard` the part of it that this rank holds.
    """

    summary: ClassVar[str]
    """One line for `longseq list`."""

    many_ranks: ClassVar[bool] = False
    """True if it runs on more than one rank."""

    takes_masks: ClassVar[bool] = False
    """True if it computes every mask of core/masks.py; False: full and causal ones."""

    takes_v_head_dim: ClassVar[bool] = False
    """True if v and the output may have another head_dim than q and k."""

    takes_scores: ClassVar[Collection[str]] = ()
    """What it computes of core.workload.Scores, by name, without a kernel of exact attention."""

    takes_decode: ClassVar[bool] = False
    """True if it computes steps of decoding: q (B, Hq, new tokens, D) against a cache k, v."""

    takes_sinks: ClassVar[bool] = False
    """True if it adds `sinks`; the default `__call__` does it by the kernel's log-sum-exp."""

    takes_latent: ClassVar[bool] = False
    """True if it decodes with a latent (core/workload.py): v is k[..., :Dv], and so in memory."""

    takes_kv_dtype: ClassVar[bool] = False
    """True if a cache may be Quantised (kernels/quantised.py)."""

    sends_itself: ClassVar[bool] = False
    """True if other code than this package's sends between ranks, past `group`."""

    chooses_layout: ClassVar[bool] = False
    """True if each call chooses from q and k which keys a query sees."""

    order: TokenOrder
    """The tokens of each rank, set before this constructor; else every rank has all tokens."""

    overlaps: bool = True
    """True if transfers between ranks run while it computes."""

    on_host: bool = False
    """True if q, k, v and the output are in host memory instead of device memory."""

    layout_s: float = 0.0
    """Seconds that the last call spent on choosing a layout from its inputs; part of the call."""

    device: str = "cpu"
    """Kind of the device; set by `prepare`."""

    exact_name: str | None = None
    """The requested kernel of exact attention, or auto; None for attention that calls none."""

    _exact: ExactKernel | None = None

    def __init__(self, workload: Workload, group: Group) -> None:
        """Raise UnsupportedError for an unsupported workload, before anything runs.

        The group may not be connected yet: anything that needs other ranks belongs in `prepare`.
        """
        if group.size > 1 and not self.many_ranks:
            raise WorldError(f"runs on one rank, not {group.size}; ddp splits a batch over ranks")
        w, scores = workload, workload.scores.given.items()
        for is_needed, is_supported, what in (
            (w.mask is not None, self.takes_masks, f"mask {w.mask} is neither full nor causal"),
            (w.latent is not None, self.takes_latent, f"latent {w.latent}"),
            (
                w.v_head_dim != w.head_dim and not w.latent,
                self.takes_v_head_dim,
                f"v_head_dim {w.v_head_dim} is unlike head_dim {w.head_dim}",
            ),
            (w.decode, self.takes_decode, "mode decode"),
            (w.sink, self.takes_sinks, "sink"),
            (w.kv_dtype, self.takes_kv_dtype, f"kv_dtype {w.kv_dtype} is for split-kv kernels"),
            # a kernel of exact attention refuses by itself
            *((not self.exact_name, n in self.takes_scores, f"{n} {c:g}") for n, c in scores),
        ):
            if is_needed and not is_supported:
                raise UnsupportedError(f"{what}: this attention can't compute it; use ring")
        if self.exact_name is not None:
            check_name(self.exact_name)
        self.workload, self.group = workload, group
        if "order" not in vars(self):
            self.order = TokenOrder("contiguous", workload.seq_len, 1)
        self.shard = self.build_shard()

    def build_shard(self) -> Shard:
        """Return the part of the tensors that this rank holds. Default: the tokens of `order`.

        In decode every rank has the queries of all new tokens.
        """
        w = self.workload
        if self.group.size == 1 or self.order.ranks == 1:
            return Shard.full(w)
        keys = self.order.runs(self.group.rank)
        return Shard.of_tokens(w, (w.queries,) if w.decode else keys, keys)

    @property
    def counts_traffic(self) -> bool:
        """True if all it sends goes through `group`: bytes are counted, and halves switched off."""
        return self.group.size == 1 or not self.sends_itself

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k, v and the output."""
        dtype: torch.dtype = getattr(torch, self.workload.dtype)
        return dtype

    @classmethod
    def unavailable_reason(cls, device: str) -> str | None:
        """Return the reason why it can't run on this kind of device; None if it can."""
        return None

    @classmethod
    def kept_blocks(cls, workload: Workload, **options: Any) -> int:
        """Return the blocks of the layout that these options give, without building it.

        0: it builds no layout, or the number is not known before. An implementation that overrides
        this has an option `block`, the tokens of a block.
        """
        return 0

    def prepare(self, device: str) -> None:
        """Build layouts and index tables, and compile. Called once, and timed separately.

        Chooses the kernel of exact attention, if the implementation calls one.
        """
        self.device = device
        if self.exact_name is not None:
            self.select_exact(self.exact_name)

    def select_exact(self, requested: str) -> None:
        """Choose the kernel of exact attention; errors are those of kernels.exact.base.select."""
        self._exact, self._exact_facts = select(requested, self.kernel_use)

    @property
    def kernel_use(self) -> Use:
        """The task of a kernel of exact attention for this workload."""
        w, own = self.workload, self.shard
        elements = len(own.batch) * len(own.heads) * own.tokens * w.head_dim
        use = Use(self.device, self.torch_dtype, w.head_dim, w.train, v_head_dim=w.v_head_dim)
        return replace(use, causal=w.causal, elements=elements, scores=w.scores)

    @property
    def comparable_kernel(self) -> str:
        """The kernel of exact attention with which a comparison shows the pattern alone."""
        return AUTO if self._exact is None else self._exact.name

    @property
    def exact(self) -> ExactKernel:
        """The kernel of exact attention on this rank, which `prepare` has chosen."""
        assert self._exact is not None, "call prepare first"
        return self._exact

    def build_kernel(self) -> AttentionKernel | None:
        """Return the kernel that computes this rank's part; None if only `__call__` does."""
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return out (B, Hq, N, Dv) of q (B, Hq, N, D), k (B, Hk, N, D) and v (B, Hk, N, Dv).

        Differentiable in train. In decode q and out have the new tokens only.
        """
        kernel = self.build_kernel()
        assert kernel is not None, f"{type(self).__name__} has neither a kernel nor a __call__"
        return attend(q, k, v, self.add_sinks(kernel), train=self.workload.train)

    @cached_property
    def sinks(self) -> Tensor | None:
        """Sinks of all query heads, (Hq,) float32, equal on all ranks; a leaf in train; or None."""
        w = self.workload
        if not w.sink:
            return None
        drawn = torch.randn(w.heads, generator=torch.Generator().manual_seed(0)).clamp_(-2, 2)
        # about a row's log-sum-exp, to be seen; beside more, float16 has no output of a single key
        usual = math.log(min(mask_pairs(w) / len(w.queries), 1024))
        sinks = ((drawn + usual) * 8).round() / 8  # every dtype has eighths exactly
        return sinks.to(device_for(self.device)).requires_grad_(w.train)

    def add_sinks(self, kernel: AttentionKernel, heads: slice | None = None) -> AttentionKernel:
        """Return a kernel with the sinks of its heads, by default those of this rank."""
        if self.sinks is None:
            return kernel
        own = slice(self.shard.heads.start, self.shard.heads.stop)
        return SinkKernel(kernel, self.sinks, heads or own)

    def sink_gradient(self) -> Tensor:
        """Return the gradient of the sinks, (Hq,) float64, summed over the workload of all ranks.

        Every rank has to call it after a backward pass. Ranks with the same rows count once.
        """
        assert self.sinks is not None
        w, own, gradient = self.workload, self.shard, self.sinks.grad
        gradient = torch.full_like(self.sinks, math.nan) if gradient is None else gradient
        rows = torch.tensor([count_tokens(own.query_tokens) * len(own.batch) * len(own.heads)])
        sums = self.group.all_sum(torch.cat([gradient.detach().double().cpu(), rows]))
        return sums[:-1] * (w.batch * w.heads * len(w.queries) / sums[-1])

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        """Return the number of times each query sees each key, (queries, keys); 0: not visible.

        Positions are global tokens. The float64 reference of a sparse pattern, which overrides
        it, is built from this. The default is exact attention: every key that the mask shows.
        """
        return visible_keys(self.workload).multiplicity(q_positions, k_positions)

    def keys_seen(self, q_positions: Positions, head: int) -> Positions | None:
        """Return the positions of all keys that any of the queries may see, ascending.

        It spares the float64 reference of a sparse pattern the other keys: the cost should grow
        with the keys returned, not with the sequence. The default, None, stands for every key.
        """
        return None

    def pattern_of(self, head: int) -> int:
        """Return a number that heads have in common only if they see the same keys."""
        return 0 if self.is_exact else head

    @property
    def is_exact(self) -> bool:
        """True if every query sees every key that the mask allows."""
        return type(self).multiplicity is Attention.multiplicity

    @property
    def sees_itself(self) -> bool:
        """True if every query that sees a key sees that of its own position, too.

        Then the check of every row can use matching scores. A sparse pattern sets it.
        """
        return self.is_exact

    def reference_rows(self, inputs: Triple, rows: Tensor) -> Tensor | None:
        """Return rows (B, Hq, R, Dv) of a forward in float64, if it is no softmax over keys.

        Overridden, it is all that the output is compared with, on one rank: the results of special
        inputs are those of a softmax. The default, None, is a softmax by `multiplicity`.
        """
        return None

    @property
    def is_softmax(self) -> bool:
        """True if the output is a softmax over keys."""
        return type(self).reference_rows is Attention.reference_rows

    def kept_pairs(self) -> float:
        """Return the query-key pairs per head, a mean; default: those that the mask shows."""
        return mask_pairs(self.workload)

    def cost(self) -> Cost:
        """Return FLOPs, floor bytes and bytes sent, by formula."""
        w = self.workload
        return Cost(attention_flops(w, self.kept_pairs()), floor_bytes(w), self.bytes_sent())

    def work_share(self) -> float:
        """Return the share of the FLOPs of all ranks that this rank computes.

        The default is for an implementation whose ranks compute the rows of q that they hold. One
        that exchanges tokens for heads overrides it. Ranks that repeat work have a sum above 1.
        """
        w, own = self.workload, self.shard
        rows = count_tokens(own.query_tokens) / len(w.queries)
        if self.is_exact:
            rows = visible_keys(w).pairs(own.query_tokens) / mask_pairs(w)
        return rows * len(own.batch) * len(own.heads) / (w.batch * w.heads)

    def bytes_to_read(self) -> int:
        """Return the bytes of keys and values that any query of a step of decoding sees."""
        w, queries, seen = self.workload, np.asarray(self.workload.queries), 0
        if self.is_exact:
            # successive queries see an interval together
            visible, ends = visible_keys(w), queries[[0, -1]]
            tokens = int(visible.stop(ends)[1] - visible.first(ends)[0])
            return tokens * key_bytes_per_token(w) + scale_bytes(w, tokens)
        for head in range(0, w.heads, w.heads // w.kv_heads):
            keys = self.keys_seen(queries, head)
            keys = np.arange(w.seq_len) if keys is None else keys
            seen += int((self.multiplicity(queries, keys, head) > 0).any(0).sum())
        return seen * key_bytes_per_token(w) // w.kv_heads + scale_bytes(w, seen // w.kv_heads)

    def bytes_sent(self) -> int:
        """Return the bytes that this rank sends in one pass, by formula."""
        return 0

    @property
    def coarsest_dtype(self) -> DType:
        """The coarsest dtype that numbers pass through; it sets the allowed error."""
        return self.workload.dtype

    def uncompressed(self) -> Attention | None:
        """Return a copy that transfers keys and values uncompressed; None if this one does."""
        return None

    def projections(self) -> dict[str, Tensor]:
        """Return the weights of a module by name: (D, D), leaves with gradients in train.

        q, k, v and out are multiplied by them from the right. Empty for attention alone.
        """
        return {}

    def parameter_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the projections, summed over the workload of all ranks.

        Every rank has to call it after a backward pass.
        """
        return {name: m.grad for name, m in self.projections().items() if m.grad is not None}

    def measures(self) -> dict[str, float]:
        """Return shares of the pattern: density_asked, density_achieved, uncovered."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return facts for the record: kernel, backend, and the reason for a fallback."""
        if self._exact is None:
            return {}
        return {"kernel": ", ".join(self.exact.ran()) or self.exact.name, **self._exact_facts}


KernelOption = Annotated[str, "kernel of exact attention; auto: the fastest available one"]
"""Type of the option `kernel` of implementations that call a kernel of exact attention."""

IMPLEMENTATIONS: Registry[type[Attention]] = Registry(
    "implementation", "longseq_bench.attention", "longseq_bench.implementations"
)
implementation = IMPLEMENTATIONS.register
