"""Split-KV attention of new tokens to a cache on CUDA, in Triton (Flash-Decoding); see decode.py.

A program computes the query heads of one KV head and all new tokens against one split of the keys,
so that a key is loaded once for its group. Query rows are padded to 16, the least that tl.dot
takes. The values of a latent are the tile of its keys that was just multiplied; its heads are cut
into blocks of rows, whose programs are neighbours and find the tile in the second-level cache. A
second kernel merges the splits. Needs triton: import it where it is used. Under TRITON_INTERPRET=1,
set before triton is imported, the kernel runs on CPU tensors.
"""

import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from longseq_bench.core.cost import KV_BLOCK
from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels.decode import MAX_ROWS, SeenKeys, choose_splits, is_latent
from longseq_bench.kernels.quantised import Quantised
from longseq_bench.kernels.triton_kernels import capped
from longseq_bench.kernels.triton_tiles import Launch, Shape, on_device

Parts = tuple[SeenKeys, ...]
PROGRAMS_PER_MULTIPROCESSOR = 4
_LOG2_E = tl.constexpr(1 / math.log(2))
_LOG_2 = tl.constexpr(math.log(2))
_SCALE_BLOCK = tl.constexpr(KV_BLOCK)
_UNITS = {torch.int8: 1, torch.float8_e4m3fn: 256}  # see _load


@triton.jit  # type: ignore[untyped-decorator]
def _factor(scales: tensor, at: tensor, UNIT: tl.constexpr) -> tensor:
    """Return the factor of the numbers of a tile of a quantised cache, see _load; else 1."""
    return tl.load(scales + at) * UNIT if UNIT else 1.0


@triton.jit  # type: ignore[untyped-decorator]
def _load(
    tensor: tensor, offsets: tensor, exists: tensor, FIRST: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr = 0, DTYPE: tl.constexpr = tl.float32,
) -> tensor:  # fmt: skip
    """Return DIM elements of rows from element FIRST on, and zeros up to WIDE; rows by offset.

    UNIT: int8 (1) or the bits of e4m3 (256), as numbers that are so many times less, in DTYPE.
    """
    dims = tl.arange(0, WIDE)
    at = tensor + offsets[:, None] + (FIRST + dims)[None, :]
    loaded = tl.load(at, mask=exists[:, None] & (dims < DIM)[None, :], other=0.0)
    if UNIT == 256:  # the bits of a smaller float16
        loaded = ((loaded.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True)
    return loaded.to(tl.float32).to(DTYPE) if UNIT else loaded


@triton.jit(do_not_specialize=["splits", "kv_heads", "rows", "queries"])  # type: ignore[untyped-decorator]
def _split(
    q: tensor, k: tensor, v: tensor, k_scale: tensor, v_scale: tensor, out: tensor, lse: tensor,
    ranges: tensor, first: tensor, stop: tensor, q_strides: tl.tuple, k_strides: tl.tuple,
    v_strides: tl.tuple, splits: tensor, kv_heads: tensor, rows: tensor, queries: tensor,
    scale: tensor, scales: tensor, DIM: tl.constexpr, WIDE: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr, REST: tl.constexpr, REST_WIDE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, CAP: tl.constexpr, UNIT: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute M query rows of one KV head with one split of its keys, N at a time.

    REST: elements of a latent after its value, which then is the first DIM ones; else 0.
    """
    blocks = tl.cdiv(rows, M)
    program = tl.program_id(0) // blocks
    part = program % splits
    head = (program // splits % kv_heads).to(tl.int64)
    batch = (program // splits // kv_heads).to(tl.int64)
    row = tl.program_id(0) % blocks * M + tl.arange(0, M)
    inside = row < rows
    of_group, token = (row // queries).to(tl.int64), (row % queries).to(tl.int64)
    q_head = head * (rows // queries) + of_group
    q_row = batch * q_strides[0] + q_head * q_strides[1] + token * q_strides[2]
    own = _load(q, q_row, inside, 0, DIM, WIDE)
    if REST:
        own_rest = _load(q, q_row, inside, DIM, REST, REST_WIDE)
    start, last = tl.load(ranges + 3 * part), tl.load(ranges + 3 * part + 1)
    token += tl.load(ranges + 3 * part + 2) * queries
    from_key = tl.load(first + token, mask=inside, other=0)
    stop_key = tl.load(stop + token, mask=inside, other=0)
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    largest = tl.full([M], float("-inf"), tl.float32)
    total, sums = tl.zeros([M], tl.float32), tl.zeros([M, V_WIDE], tl.float32)
    # a tile of a quantised cache is within a block of one scale
    first_tile, of_head = start // N * N if UNIT else start, (batch * kv_heads + head) * scales
    for at in range(first_tile, last, N):
        key = at + tl.arange(0, N).to(tl.int64)
        exists = (key >= start) & (key < last) if UNIT else key < last
        keys = _load(k, key * k_strides[2], exists, 0, DIM, WIDE, UNIT, own.dtype)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee")
        if REST:
            rest = _load(k, key * k_strides[2], exists, DIM, REST, REST_WIDE)
            scores += tl.dot(own_rest, tl.trans(rest), input_precision="ieee")
        scores *= _factor(k_scale, of_head + at // _SCALE_BLOCK, UNIT)
        scores = capped(scores, CAP) * (scale * _LOG2_E)
        visible = (key[None, :] >= from_key[:, None]) & (key[None, :] < stop_key[:, None])
        scores = tl.where(exists[None, :] & visible, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        # rows without any key so far stay 0 and -inf
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(largest - shift)
        total = total * keep + tl.sum(weights, 1)
        values = (
            keys
            if REST
            else _load(v, key * v_strides[2], exists, 0, V_DIM, V_WIDE, UNIT, own.dtype)
        )
        added = tl.dot(weights.to(own.dtype), values, input_precision="ieee")
        added *= _factor(v_scale, of_head + at // _SCALE_BLOCK, UNIT)
        sums, largest = sums * keep[:, None] + added, new
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    # (splits, B, Hk, group, m): the rows of a program are neighbours
    batches = tl.num_programs(0) // blocks // splits // kv_heads
    to = ((part.to(tl.int64) * batches + batch) * kv_heads + head) * rows + row
    tl.store(lse + to, largest * _LOG_2 + tl.log(total), mask=inside)
    v_dims = tl.arange(0, V_WIDE)
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, parts: Parts, dtype: torch.dtype, scores: Scores = PLAIN_SCORES
) -> tuple[Tensor, Tensor]:
    """Return the output (B, Hq, m, Dv) in a dtype, and the log-sum-exp (B, Hq, m) in float32.

    parts: sets of keys that do not overlap.  decode.cuda_limit_reason says what is not supported.
    """
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride()[:3], k.stride()[:3], v.stride()[:3])
    factors = scores.factors(q.shape[3]), is_latent(k, v), _UNITS.get(k.dtype, 0)
    splits, tables, split, join = _step(parts, q.device, q.dtype, shapes, strides, dtype, *factors)
    scales = [t.scale if isinstance(t, Quantised) else t for t in (k, v)]
    k, v = (t.view(torch.int8) if isinstance(t, Quantised) else t for t in (k, v))
    shape = (*q.shape[:3], v.shape[3])
    joined = torch.empty(shape, dtype=dtype, device=q.device)
    joined_lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    out, lse = joined, joined_lse
    if splits > 1:
        out = torch.empty((splits, *shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, *shape[:3]), dtype=torch.float32, device=q.device)
    with on_device(q):
        split(q, k, v, *scales, out, lse, *tables)
        if splits > 1:
            join(out, lse, joined, joined_lse)
    return joined, joined_lse


@functools.lru_cache(maxsize=16)
def _step(
    parts: Parts, device: torch.device, dtype: torch.dtype, *of_tensors: Any
) -> tuple[int, list[Tensor], Launch, Launch]:
    """Prepare steps of one shape: on the host that takes longer than to start both kernels.

    of_tensors: shapes and strides of q, k and v, dtype of the output, factor and cap of q·k, if k
    is a latent, and UNIT.
    Returns the number of splits; keys and part of each, with the keys that tokens see of a part;
    the launches.
    """
    (q_shape, k_shape, (*_, v_dim)), strides, _, (scale, cap), latent, unit = of_tensors
    (batch, heads, queries, dim), (_, kv_heads, tokens, _) = q_shape, k_shape
    rows, rest = heads // kv_heads * queries, dim - v_dim if latent else 0
    dim -= rest
    tile = tile_of(min(rows, MAX_ROWS[dtype]), max(dim, v_dim), dtype)
    units = batch * kv_heads * -(-rows // tile.queries)
    lengths = [part.end - part.begin for part in parts]
    wanted = choose_splits(units, sum(lengths), _workers(device), tile.keys)
    ranges = []
    for i, (part, keys) in enumerate(zip(parts, lengths, strict=True)):
        own = max(1, round(wanted * keys / max(1, sum(lengths))))
        ends = [part.begin + keys * n // own for n in range(own + 1)]
        ranges += [(start, last, i) for start, last in itertools.pairwise(ends)]
    arrays = ranges, [part.first for part in parts], [part.stop for part in parts]
    tables = [torch.from_numpy(np.asarray(a, dtype=np.int64)).to(device) for a in arrays]
    splits, v_wide = len(ranges), _wide(v_dim)
    sizes = splits, kv_heads, rows, queries, scale, -(-tokens // KV_BLOCK)
    constants = {"DIM": dim, "WIDE": _wide(dim), "V_DIM": v_dim, "V_WIDE": v_wide, "CAP": cap}
    constants |= {"REST": rest, "REST_WIDE": _wide(rest)}
    constants |= {"M": tile.queries, "N": tile.keys, "UNIT": unit, **tile.options}
    split = Launch(_split, splits * units, (*strides, *sizes), constants)
    constants = {"DIM": v_dim, "WIDE": v_wide, "S": 32}
    return splits, tables, split, Launch(_join, batch * heads * queries, [splits], constants)


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
    return max(16, int(triton.next_power_of_2(max(1, dim))))


def _workers(device: torch.device) -> int:
    """Return the programs that run at the same time; few in Triton's interpreter."""
    if device.type == "cpu":
        return 1
    count = 132  # of an H100, where there is no device
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    # choose_splits multiplies by the units per worker
    return max(1, count * PROGRAMS_PER_MULTIPROCESSOR // 8)
