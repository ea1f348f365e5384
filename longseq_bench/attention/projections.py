"""A module round an attention: q, k, v and the output each pass through a matrix of their own.

Data parallelism and sharded parameters are about parameters, so there have to be some. One
(D, D) matrix serves all heads of q, one those of k, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from longseq_bench.meta_mode import device_for

NAMES = ("q", "k", "v", "out")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Projected(nn.Module):
    """out = attend(q Wq, k Wk, v Wv) Wout; the matrices drawn from a seed, equal on every rank."""

    def __init__(
        self, attend: Attend, head_dim: int, dtype: torch.dtype, device: str, seed: int = 0
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self._attend = attend
        self.weights = nn.ParameterDict()
        for name in NAMES:
            # orthogonal, so that scores stay as spread as those of the inputs
            made = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=draw))[0]
            self.weights[name] = nn.Parameter(made.to(device_for(device), dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, Hq, N, D); k, v (B, Hk, N, D) -> (B, Hq, N, D)."""
        w = self.weights
        out: Tensor = self._attend(q @ w["q"], k @ w["k"], v @ w["v"]) @ w["out"]
        return out


def projection_flops(elements: int, head_dim: int, train: bool) -> float:
    """Of multiplying tensors of so many elements in all by a (D, D) matrix; backward is twice."""
    return 2.0 * elements * head_dim * (3 if train else 1)


def parameter_bytes(head_dim: int, dtype_bytes: int) -> int:
    """Of all four matrices."""
    return len(NAMES) * math.prod((head_dim, head_dim)) * dtype_bytes
