"""Attention with all scores in memory, softmax by its definition; reference for torch_fused."""

import math

import torch
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp, in the dtype of the inputs.

    q (B, Hq, Nq, D); k, v (B, Hk, Nk, D) with Hk dividing Hq; causal needs Nq == Nk.
    Returns out (B, Hq, Nq, D) and the log-sum-exp of the scaled scores (B, Hq, Nq).
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ v, lse
