"""Two functions to measure: exact attention in blocks of queries, and a window by a mask."""

from typing import Annotated

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


def my_attention(q, k, v, *, causal, chunk: Annotated[int, "queries at a time"] = 512):
    """Exact attention, some queries at a time."""
    out, tokens = [], q.shape[2]
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        scores = q[:, :, start:stop] @ k.transpose(2, 3) * q.shape[3] ** -0.5
        if causal:
            future = torch.ones(stop - start, tokens, dtype=torch.bool, device=q.device)
            scores.masked_fill_(future.triu(start + 1), float("-inf"))
        out.append(scores.softmax(3) @ v)
    return torch.cat(out, 2)


def my_window(q, k, v, *, causal, enable_gqa, window: Annotated[int, "tokens to each side"] = 256):
    """Attention to the keys at most a window away."""
    positions = torch.arange(q.shape[2], device=q.device)
    distance = positions[:, None] - positions[None, :]
    visible = distance.abs() <= window
    if causal:
        visible &= distance >= 0
    return sdpa(q, k, v, attn_mask=visible, enable_gqa=enable_gqa)


def _near(q_positions, k_positions, head, *, window):
    """Return which query sees which key, (queries, keys), from positions in numpy arrays."""
    return abs(q_positions[:, None] - k_positions[None, :]) <= window


my_window.pattern = _near
