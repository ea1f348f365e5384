"""The backward of FlashAttention-2 in parts that its 32-bit index can address.

Its float32 sums of dQ are one buffer of all heads of a call. Beyond 2^31 elements it writes to
other memory (an illegal memory access, or silent errors). So a call gets fewer rows of the batch
or fewer heads.

Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.base import Pair, Queries, Triple

MAX_INDEX = 2**31 - 1


Call = Callable[[Queries, Pair], Triple]
_Part = tuple[slice, slice, slice]
"""Rows of the batch, query heads and KV heads of a call."""


def backward_elements(batch: int, heads: int, tokens: int, head_dim: int) -> int:
    """Return the elements of the backward's largest buffer."""
    return batch * heads * round_up(tokens, TILE_ROWS) * round_head_dim(head_dim)


def backward_in_parts(name: str, queries: Queries, keys: Pair, call: Call) -> Triple:
    """Return the gradients of q, k and v by as many calls as the index needs.

    Args:
        name: of the kernel, for the error.
        queries: grad_out, q, out (B, Hq, N, D) and lse (B, Hq, N).
        keys: k and v (B, Hk, N, D).
        call: the backward of one part.

    Raises KernelLimitError if not even one query head can be addressed.
    """
    (grad_out, q, out, lse), (k, v) = queries, keys
    of_one = backward_elements(1, 1, max(q.shape[2], k.shape[2]), q.shape[3])
    if of_one > MAX_INDEX:
        raise KernelLimitError(
            f"{name}: the backward of one head has {of_one:,} elements; its kernel indexes at most "
            f"{MAX_INDEX:,}"
        )
    heads = MAX_INDEX // of_one
    if heads >= q.shape[0] * q.shape[1]:
        return call(queries, keys)
    grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for batch, own, kv in _parts(q.shape[0], q.shape[1], k.shape[1], heads):
        rows, seen = (batch, own), (batch, kv)
        part = call((grad_out[rows], q[rows], out[rows], lse[rows]), (k[seen], v[seen]))
        grads[0][rows] = part[0]
        # query heads of one KV head may be in several parts
        grads[1][seen] += part[1]
        grads[2][seen] += part[2]
    return grads


def _parts(batch: int, heads: int, kv_heads: int, most: int) -> Iterator[_Part]:
    """Yield parts of at most `most` query heads, counted over the batch."""
    group = heads // kv_heads
    rows = max(1, most // heads)
    kv_step, own_step = max(1, min(kv_heads, most // group)), min(group, most)
    for first in range(0, batch, rows):
        for kv in range(0, kv_heads, kv_step):
            seen = slice(kv, min(kv + kv_step, kv_heads))
            if own_step == group:
                yield slice(first, first + rows), slice(kv * group, seen.stop * group), seen
                continue
            for start in range(kv * group, seen.stop * group, own_step):
                own = slice(start, min(start + own_step, seen.stop * group))
                yield slice(first, first + rows), own, seen


# ---- buffers of the packages' backward, for dry runs ---------------------------------------------
# A dry run has no data, so it can't call the packages. It allocates tensors of the same size
# instead. Letters: B batch, Hq query heads, Hk KV heads, N tokens, D head_dim.

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
