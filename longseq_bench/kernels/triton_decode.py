"""Split-KV attention of new tokens to a cache on CUDA, in Triton (Flash-Decoding); see decode.py.

A program computes the query heads of one KV head and all new tokens against one split of the keys,
so that a key is loaded once for its group. Query rows are padded to 16, the least that tl.dot
takes. A second kernel merges the splits. Needs triton: import it where it is used. Under
TRITON_INTERPRET=1, set before triton is imported, the kernel runs on CPU tensors.
"""

import functools
import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from longseq_bench.kernels.base import check_strides
from longseq_bench.kernels.decode import SeenKeys, choose_splits
from longseq_bench.kernels.triton_tiles import Launch, Shape, on_device

PROGRAMS_PER_MULTIPROCESSOR = 4
_LOG2_E = tl.constexpr(1 / math.log(2))
_LOG_2 = tl.constexpr(math.log(2))


@triton.jit(do_not_specialize=["begin", "end", "splits", "kv_heads", "rows", "queries"])  # type: ignore[untyped-decorator]
def _split(
    q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, first: tensor, stop: tensor,
    q_strides: tl.tuple, k_strides: tl.tuple, v_strides: tl.tuple, begin: tensor, end: tensor,
    splits: tensor, kv_heads: tensor, rows: tensor, queries: tensor, scale: tensor,
    DIM: tl.constexpr, WIDE: tl.constexpr, V_DIM: tl.constexpr, V_WIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute M query rows of one KV head with one split of its keys, N at a time."""
    program = tl.program_id(0)
    part = program % splits
    head = (program // splits % kv_heads).to(tl.int64)
    batch = (program // splits // kv_heads).to(tl.int64)
    row = tl.arange(0, M)
    inside = row < rows
    of_group, token = (row // queries).to(tl.int64), (row % queries).to(tl.int64)
    dims, v_dims = tl.arange(0, WIDE), tl.arange(0, V_WIDE)
    q_head = head * (rows // queries) + of_group
    q += batch * q_strides[0] + q_head[:, None] * q_strides[1] + token[:, None] * q_strides[2]
    own = tl.load(q + dims[None, :], mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    from_key = tl.load(first + token, mask=inside, other=0)
    stop_key = tl.load(stop + token, mask=inside, other=0)
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    # 64 bits: the number of keys times that of splits exceeds 32 bits
    keys_of_all = (end - begin).to(tl.int64)
    start = begin + keys_of_all * part // splits
    last = begin + keys_of_all * (part + 1) // splits
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, V_WIDE], tl.float32)
    for at in range(start, last, N):
        key = at + tl.arange(0, N).to(tl.int64)
        exists = key < last
        k_mask = exists[:, None] & (dims < DIM)[None, :]
        keys = tl.load(k + key[:, None] * k_strides[2] + dims[None, :], mask=k_mask, other=0.0)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee") * (scale * _LOG2_E)
        visible = exists[None, :] & (key[None, :] >= from_key[:, None])
        visible = visible & (key[None, :] < stop_key[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        # rows without any key so far stay 0 and -inf
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(largest - shift)
        total = total * keep + tl.sum(weights, 1)
        v_mask = exists[:, None] & (v_dims < V_DIM)[None, :]
        values = tl.load(v + key[:, None] * v_strides[2] + v_dims[None, :], mask=v_mask, other=0.0)
        added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        sums = sums * keep[:, None] + added
        largest = new
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    # (splits, B, Hk, group, m): the rows of a program are neighbours
    batches = tl.num_programs(0) // splits // kv_heads
    to = ((part.to(tl.int64) * batches + batch) * kv_heads + head) * rows + row
    tl.store(lse + to, largest * _LOG_2 + tl.log(total), mask=inside)
    out_mask = inside[:, None] & (v_dims < V_DIM)[None, :]
    tl.store(out + to[:, None] * V_DIM + v_dims[None, :], sums, mask=out_mask)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _join(
    out: tensor, lse: tensor, joined: tensor, joined_lse: tensor, splits: tensor,
    DIM: tl.constexpr, WIDE: tl.constexpr, S: tl.constexpr,
) -> tensor:  # fmt: skip
    """Merge the splits of one query row, S at a time."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dims = tl.arange(0, WIDE)
    inside = (dims < DIM)[None, :]
    largest, total, sums = float("-inf"), 0.0, tl.zeros([WIDE], tl.float32)
    for at in range(0, splits, S):
        part = at + tl.arange(0, S).to(tl.int64)
        exists = part < splits
        of_row = part * rows + row
        own = tl.load(lse + of_row, mask=exists, other=float("-inf"))
        new = tl.maximum(largest, tl.max(own, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights, keep = tl.exp(own - shift), tl.exp(largest - shift)
        at_row = out + of_row[:, None] * DIM + dims[None, :]
        values = tl.load(at_row, mask=exists[:, None] & inside, other=0.0)
        total = total * keep + tl.sum(weights, 0)
        sums = sums * keep + tl.sum(weights[:, None] * values, 0)
        largest = new
    sums = sums / tl.where(total == 0, 1.0, total)
    tl.store(joined + row * DIM + dims, sums, mask=dims < DIM)
    tl.store(joined_lse + row, largest + tl.log(total))


def forward(q: Tensor, k: Tensor, v: Tensor, seen: SeenKeys) -> tuple[Tensor, Tensor]:
    """Return the output (B, Hq, m, Dv) and log-sum-exp (B, Hq, m) in float32; see decode.forward.

    decode.cuda_limit_reason says what it does not support.
    """
    check_strides("the decode kernel", q, k, v)
    batch, heads, queries, dim = q.shape
    kv_heads, v_dim = k.shape[1], v.shape[3]
    rows = heads // kv_heads * queries
    tile = tile_of(rows, max(dim, v_dim), q.dtype)
    splits = choose_splits(batch * kv_heads, seen.end - seen.begin, _workers(q), tile.keys)
    out = torch.empty(splits, batch, heads, queries, v_dim, device=q.device)
    lse = torch.empty(splits, batch, heads, queries, device=q.device)
    tensors = q, k, v, out, lse, *_ends(seen, q.device)
    strides = [t.stride()[:3] for t in (q, k, v)]
    sizes = seen.begin, seen.end, splits, kv_heads, rows, queries, dim**-0.5
    widths = {"DIM": dim, "WIDE": _wide(dim), "V_DIM": v_dim, "V_WIDE": _wide(v_dim)}
    tile_sizes = {"M": tile.queries, "N": tile.keys, **tile.options}
    split = Launch(_split, splits * batch * kv_heads, (*strides, *sizes), widths | tile_sizes)
    with on_device(q):
        split(*tensors)
        if splits == 1:
            return out[0], lse[0]
        joined, joined_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])
        constants = {"DIM": v_dim, "WIDE": _wide(v_dim), "S": 32}
        Launch(_join, lse[0].numel(), [splits], constants)(out, lse, joined, joined_lse)
    return joined, joined_lse


@functools.lru_cache(maxsize=4)
def _ends(seen: SeenKeys, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first key and the key after the last that each new token sees, on the device.

    A copy from the host takes longer than to start both kernels; the steps of a trial are alike.
    """
    first, stop = (
        torch.from_numpy(np.asarray(ends, dtype=np.int64)).to(device)
        for ends in (seen.first, seen.stop)
    )
    return first, stop


def tile_of(rows: int, head_dim: int, dtype: torch.dtype) -> Shape:
    """Return the tile for some query rows of a KV head.

    It fits in shared memory, and no register spills; float32 has no tensor cores, and its products
    take more of them. On an H100 two stages are faster for 16 rows, three for more.
    """
    tile_bytes = 2**13 if dtype == torch.float32 else 2**14
    keys = max(16, min(64, tile_bytes // (_wide(head_dim) * dtype.itemsize)))
    queries = max(16, triton.next_power_of_2(rows))
    warps = 8 if queries * _wide(head_dim) > 2**13 else 4
    return Shape(queries, keys, warps, stages=2 if queries == 16 else 3)


def _wide(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _workers(q: Tensor) -> int:
    """Return the programs that run at the same time; few in Triton's interpreter."""
    if not q.is_cuda and not q.is_meta:
        return 1
    # without a device, as many as an H100
    count = 132 if q.is_meta else torch.cuda.get_device_properties(q.device).multi_processor_count
    # choose_splits multiplies by the units per worker
    return max(1, count * PROGRAMS_PER_MULTIPROCESSOR // 8)
