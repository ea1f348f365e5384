"""The backward of FlashAttention: calls that its 32-bit index can address, and its buffers.

The float32 sums of dQ of version 2 are one buffer of all heads of a call. Beyond 2^31 elements it
writes to other memory (an illegal memory access, or silent errors). Then each KV head is a call.

A dry run has no data, so it can't call the packages. It allocates tensors of the same size instead.

Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.base import Pair, Queries, Triple

MAX_INDEX = 2**31 - 1

TILE_ROWS = 128
"""The number of tokens is rounded up to a multiple of it."""


def backward_elements(batch: int, heads: int, tokens: int, head_dim: int) -> int:
    """Return the elements of the backward's largest buffer."""
    return batch * heads * _round_up(tokens, TILE_ROWS) * _round_head_dim(head_dim)


def backward_in_parts(
    name: str, queries: Queries, keys: Pair, call: Callable[[Queries, Pair], Triple]
) -> Triple:
    """Return the gradients of q, k and v by one call, or by one for each sequence and KV head.

    name: of the kernel, for the error.  queries: grad_out, q, out (B, Hq, N, D) and lse (B, Hq, N).
    keys: k and v (B, Hk, N, D).  call: the backward of one part.

    Raises KernelLimitError if the query heads of one KV head can't be addressed.
    """
    (grad_out, q, out, lse), (k, v) = queries, keys
    (batch, heads, rows, dim), kv_heads = q.shape, k.shape[1]
    group, tokens = heads // kv_heads, max(rows, k.shape[2])
    if backward_elements(batch, heads, tokens, dim) <= MAX_INDEX:
        return call(queries, keys)
    if (of_one := backward_elements(1, group, tokens, dim)) > MAX_INDEX:
        raise KernelLimitError(
            f"{name}: the backward of one KV head has {of_one:,} elements; its kernel indexes at "
            f"most {MAX_INDEX:,}"
        )
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for b, kv in product(range(batch), range(kv_heads)):
        own = slice(b, b + 1), slice(kv * group, (kv + 1) * group)
        seen = slice(b, b + 1), slice(kv, kv + 1)
        part = call((grad_out[own], q[own], out[own], lse[own]), (k[seen], v[seen]))
        for grad, at, result in zip(grads, (own, seen, seen), part, strict=True):
            grad[at] = result
    return grads


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _round_head_dim(head_dim: int) -> int:
    """Return the head_dim of the sums of FlashAttention-2 in torch.

    The package flash-attn rounds 129 to 160 up to 160 in some versions, and never to more than
    this.
    """
    return _round_up(head_dim, 32 if head_dim <= 128 else 64)


def allocate_flash_2(q: Tensor, k: Tensor) -> list[Tensor]:
    """Return the buffers of FlashAttention-2: mha_bwd of csrc/flash_attn/flash_api.cpp.

    They are float32 sums of dq, a number per query, and for grouped heads dk and dv of all query
    heads. q (B, Hq, N, D), k (B, Hk, N, D).
    """
    batch, heads, tokens, dim = q.shape
    rows = _round_up(tokens, TILE_ROWS)
    buffers = [q.new_empty(batch, rows, heads, _round_head_dim(dim), dtype=torch.float32)]
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
    return batch * heads * _round_up(tokens, TILE_ROWS) * _round_up(head_dim, 32)
