"""A module around an attention: q, k, v and the output are each multiplied by a weight matrix.

Data parallelism and sharded parameters need parameters. One (D, D) matrix serves all heads of q,
one all heads of k, and so on.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from longseq_bench.attention.base import Attention, Cost
from longseq_bench.core.model import Workload
from longseq_bench.core.workload import ALL_SCORES
from longseq_bench.meta_mode import device_for

NAMES = ("q", "k", "v", "out")


class Projected(nn.Module):
    """out = attend(q Wq, k Wk, v Wv) Wout; weights are drawn from a seed, equal on all ranks."""

    def __init__(
        self,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self._attend = attend
        self.weights = nn.ParameterDict()
        for name in NAMES:
            # orthogonal, so that scores keep the spread of the inputs' scores
            weight = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))[0]
            self.weights[name] = nn.Parameter(weight.to(device_for(device), dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output: q (B, Hq, N, D); k, v (B, Hk, N, D) -> (B, Hq, N, D)."""
        w = self.weights
        out: Tensor = self._attend(q @ w["q"], k @ w["k"], v @ w["v"]) @ w["out"]
        return out


class ProjectedAttention(Attention):
    """An inner attention between projections.

    inner: gives the pattern and the cost, for the workload of all ranks. A subclass sets it, and in
    `prepare` sets `module` (a Projected, which may be wrapped) and `weights` (of the Projected).
    """

    takes_scores = ALL_SCORES  # if the inner attention does

    inner: Attention
    module: nn.Module
    weights: nn.ParameterDict

    multiplicity: Any = property(attrgetter("inner.multiplicity"))
    keys_seen: Any = property(attrgetter("inner.keys_seen"))
    pattern_of: Any = property(attrgetter("inner.pattern_of"))
    is_exact: Any = property(attrgetter("inner.is_exact"))
    sees_itself: Any = property(attrgetter("inner.sees_itself"))
    kept_pairs: Any = property(attrgetter("inner.kept_pairs"))
    measures: Any = property(attrgetter("inner.measures"))
    facts: Any = property(attrgetter("inner.facts"))
    sinks: Any = property(attrgetter("inner.sinks"))

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.workload.train):
            out: Tensor = self.module(q, k, v)
        return out

    @override
    def cost(self) -> Cost:
        cost = super().cost()
        return replace(cost, flops=cost.flops + projection_flops(self.workload))

    @override
    def projections(self) -> dict[str, Tensor]:
        return dict(self.weights.items())


def projection_flops(w: Workload, elements: int | None = None) -> float:
    """Return the FLOPs of projecting tensors; backward takes twice the forward.

    elements: number of elements of all projected tensors; None: those of q, k, v and out.
    """
    if elements is None:
        elements = 2 * w.batch * w.seq_len * (w.heads + w.kv_heads) * w.head_dim
    return 2.0 * elements * w.head_dim * (3 if w.train else 1)


def parameter_bytes(head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes of all four weights."""
    return len(NAMES) * head_dim**2 * dtype_bytes
