"""Buffers that the backward of FlashAttention packages allocates, for dry runs.

A dry run has no data, so it can't call the packages. It allocates tensors of the same size instead.

Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim.
"""

import torch
from torch import Tensor

TILE_ROWS = 128
"""The number of tokens is rounded up to a multiple of it."""


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple of a number that is not smaller."""
    return -(-number // multiple) * multiple


def round_head_dim(head_dim: int) -> int:
    """Return the head_dim of the sums of FlashAttention-2 in torch.

    The package flash-attn rounds 129 to 160 up to 160 in some versions, and never to more than
    this.
    """
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


def allocate_flash_2(q: Tensor, k: Tensor) -> list[Tensor]:
    """Return the buffers of FlashAttention-2: mha_bwd of csrc/flash_attn/flash_api.cpp.

    They are float32 sums of dq, a number per query, and for grouped heads dk and dv of all query
    heads. q (B, Hq, N, D), k (B, Hk, N, D).
    """
    batch, heads, tokens, dim = q.shape
    rows = round_up(tokens, TILE_ROWS)
    buffers = [q.new_empty(batch, rows, heads, round_head_dim(dim), dtype=torch.float32)]
    buffers.append(q.new_empty(batch, heads, rows, dtype=torch.float32))
    if heads != k.shape[1]:
        buffers += [k.new_empty(batch, k.shape[2], heads, dim) for _ in range(2)]
    return buffers


def allocate_flash_3_and_4(q: Tensor, k: Tensor) -> list[Tensor]:
    """Return tensors about as large as the buffers of FlashAttention-3 and 4.

    They are float32: sums of dq, those of dk and dv for grouped heads, and two numbers per query.
    """
    sums = [q] if q.shape[1] == k.shape[1] else [q, k, k]
    sizes = [*map(sum_elements, sums), 2 * q.shape[:3].numel()]
    return [q.new_empty(size, dtype=torch.float32) for size in sizes]


def sum_elements(t: Tensor) -> int:
    """Return the elements of the sums of a gradient: tokens and head_dim are rounded up."""
    batch, heads, tokens, head_dim = t.shape
    return batch * heads * round_up(tokens, TILE_ROWS) * round_up(head_dim, 32)
