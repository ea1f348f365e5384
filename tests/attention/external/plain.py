"""What fakes of libraries compute: attention in torch, over visible pairs."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attention in the layout (B, N, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return sdpa(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)


def distances(tokens: int) -> Tensor:
    positions = torch.arange(tokens)
    return positions[:, None] - positions
