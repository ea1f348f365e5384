"""Standard attention with the full score matrix: the O(n²) baseline of the reports."""

import math

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, implementation
from longseq_bench.attention.masked import visible_pairs_of
from longseq_bench.meta_mode import refuse_limited_loops


@implementation("dense")
class Dense(Attention):
    """softmax(q kᵀ / √D) v with the scores (B, Hq, N, N) materialised."""

    takes_masks = True
    takes_v_head_dim = True
    summary = "standard attention: all scores are in memory, O(n²)"

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        refuse_limited_loops()
        B, Hq, N, D = q.shape
        Hk = k.shape[1]
        # query heads that share a key head are adjacent, so k and v need no repeated copy
        q_grouped = q.reshape(B, Hk, Hq // Hk * N, D)
        scores = (q_grouped @ k.transpose(-1, -2)).reshape(B, Hk, Hq // Hk, N, N)
        scores = scores.mul_(1 / math.sqrt(D)) if not scores.requires_grad else scores / D**0.5
        if self.workload.causal and self.workload.mask is None:
            later = torch.ones(N, N, dtype=torch.bool, device=q.device).triu_(1)
            scores = scores.masked_fill(later, -math.inf)
        if self.workload.mask is not None:
            scores = scores.masked_fill(~visible_pairs_of(self.workload, q.device), -math.inf)
        shares = torch.softmax(scores, -1)
        return (shares.reshape(B, Hk, Hq // Hk * N, N) @ v).reshape(B, Hq, N, v.shape[3])
