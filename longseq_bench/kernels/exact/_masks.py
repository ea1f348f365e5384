"""Masks of torch's fused kernels: a term added to the scores."""

import torch
from torch import Tensor

_ALIGNED_KEYS = 8
"""Elements to which the memory-efficient kernel needs each row of the term aligned."""


def bias_of(mask: Tensor, q: Tensor) -> Tensor:
    """Return a mask (Nq, Nk) as a term that is added to the scores: 0 or -inf, like q."""
    rows, keys = mask.shape
    bias = q.new_zeros(rows, -(-keys // _ALIGNED_KEYS) * _ALIGNED_KEYS)[:, :keys]
    return bias.masked_fill_(~mask.to(q.device), -torch.inf)


def clear_empty_rows(out: Tensor, lse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results with 0 and -inf in rows that see nothing.

    The kernels return another log-sum-exp there. One that is not kept may have no rows.
    """
    empty = ~mask.any(1).to(out.device)
    kept = lse.masked_fill(empty, -torch.inf) if lse.numel() else lse
    return out.masked_fill(empty[:, None], 0.0), kept


def hide_empty_rows(lse: Tensor) -> Tensor:
    """Return the log-sum-exp for a backward: rows that see nothing get weights of 0.

    Otherwise they would be exp(-inf + inf).
    """
    return lse.masked_fill(lse == -torch.inf, torch.inf)
