"""Attention with all scores in memory, softmax by its definition: the reference of all kernels."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longseq_bench.patterns.block_layout import BlockLayout


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp, in the dtype of the inputs.

    q (B, Hq, Nq, D); k, v (B, Hk, Nk, D) with Hk dividing Hq; causal needs Nq == Nk.
    counts: how often each query sees each key, (Nq, Nk) or (Hq, Nq, Nk).
    Returns out (B, Hq, Nq, D) and the log-sum-exp of the scaled scores (B, Hq, Nq); of rows that
    see nothing 0 and -inf.
    """
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if counts is None:
        counts = torch.ones(scores.shape[-2:])
    if causal:
        counts = counts.tril()
    scores = scores.masked_fill(counts == 0, -math.inf)
    top = scores.amax(-1, keepdim=True).detach().nan_to_num(neginf=0.0)
    weights = counts * torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1.0) @ v, (total.log() + top).squeeze(-1)


def gradients(
    tensors: Sequence[Tensor], grad_out: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, log-sum-exp and gradients of q, k and v in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    out, lse = forward(q, k, v, counts=counts)
    grads = torch.autograd.grad(out, (q, k, v), grad_out.double())
    return out.detach(), lse.detach(), grads


def masks(layouts: Sequence[BlockLayout]) -> Tensor:
    """Which queries see which keys, (layouts, N, N)."""
    tokens = np.arange(layouts[0].seq_len)
    return torch.from_numpy(np.stack([one.multiplicity(tokens, tokens) > 0 for one in layouts]))
