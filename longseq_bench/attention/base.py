"""The contract of an implementation: what it is built from, what it does, what it states.

An implementation is a class, one a file, registered by name. Its options are its keyword-only
parameters; annotate them `Annotated[type, "help"]`. Other packages add theirs through the
entry-point group `longseq_bench.implementations`, the entry's name being the implementation's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.cost import Cost, dense_cost
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import DType, Workload
from longseq_bench.core.registry import Registry
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard

Positions = NDArray[np.int64]
Counts = NDArray[np.int_] | NDArray[np.bool_]


NO_INPLACE = (
    "this needs its inputs to the end; on one rank ring and collective with a chunk don't, nor, on "
    "a CPU, do block-sparse, dilated and hilbert"
)


class Attention(ABC):
    """One way to compute attention for one workload on one rank of a group.

    Letters: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim, each this rank's share; `shard`
    says which, `workload` is that of all ranks together.
    """

    summary: ClassVar[str]
    many_ranks: ClassVar[bool] = False
    """Whether it can be spread over ranks."""

    overlaps: bool = True
    """Whether transfers between ranks go on while it computes."""

    on_host: bool = False
    """Whether q, k, v and the output lie in the host's memory instead of the device's."""

    layout_s: float = 0.0
    """Seconds of the last call that went into planning by its inputs; part of the call."""

    def __init__(self, workload: Workload, group: Group) -> None:
        """Raises UnsupportedError, before anything runs, for what it can't do.

        The group may not be connected yet: what needs its peers is made in `prepare`.
        """
        if group.size > 1 and not self.many_ranks:
            raise WorldError(f"runs on one rank; ddp spreads a batch of it over {group.size}")
        self.workload, self.group = workload, group
        self.shard = self._shard()

    def _shard(self) -> Shard:
        """What of the tensors this rank holds."""
        return Shard.full(self.workload)

    @classmethod
    def unavailable_reason(cls, device: str) -> str | None:
        """Why it can't run on this kind of device here; None where it can."""
        return None

    def prepare(self, device: str) -> None:  # noqa: B027  (most have nothing to plan)
        """Layouts, index tables, compilation: what is done once and timed apart."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, Hq, N, D); k, v (B, Hk, N, D) -> out (B, Hq, N, D), differentiable in train."""

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of q, k, v from the inputs alone; None where that is no other than a forward
        and a backward. inplace: that of q goes over q. Raises UnsupportedError where it can't."""
        if inplace:
            raise UnsupportedError(f"keep=nothing: {NO_INPLACE}")
        return None

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output over q; not differentiable. Raises UnsupportedError where it can't be."""
        raise UnsupportedError(f"keep=nothing: {NO_INPLACE}")

    @abstractmethod
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        """How often a query sees a key, (queries, keys); 0: not at all.

        Positions are global tokens. Every reference is built from this.
        """

    def cost(self) -> Cost:
        """FLOPs, floor bytes and bytes sent, by formula."""
        return dense_cost(self.workload)

    @property
    def coarsest_dtype(self) -> DType:
        """The coarsest dtype that numbers pass through, which sets how far off they may be."""
        return self.workload.dtype

    def projections(self) -> dict[str, Tensor]:
        """Of a module: matrices (D, D) by which q, k, v and out are multiplied from the right,
        leaves with gradients in train. Empty for attention alone."""
        return {}

    def parameter_gradients(self) -> dict[str, Tensor]:
        """After a backward, the gradients of those matrices, summed over the whole workload on
        all ranks. Every rank has to ask."""
        return {name: m.grad for name, m in self.projections().items() if m.grad is not None}

    def measures(self) -> dict[str, float]:
        """Shares that the pattern has: density_asked, density_achieved, uncovered."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Words about how it runs: kernel, backend, what a fall-back would hide."""
        return {}


class ExactAttention(Attention):
    """Every query sees every key, or, causal, those at or before it."""

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        if self.workload.causal:
            return k_positions[None, :] <= q_positions[:, None]
        return np.ones((len(q_positions), len(k_positions)), dtype=np.bool_)


IMPLEMENTATIONS: Registry[type[Attention]] = Registry(
    "implementation", "longseq_bench.attention", "longseq_bench.implementations"
)
implementation = IMPLEMENTATIONS.register
