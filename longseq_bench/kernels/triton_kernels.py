"""Triton kernels of block-sparse attention; triton_blocks.py launches them.

FlashAttention-2 (arXiv 2307.08691): online softmax forward; backward from the output and the
log-sum-exp, one kernel for dQ over the rows of the layout, one for dK and dV over its columns.

In kernels M and N are the queries and keys of one tile, WIDE is head_dim (DIM) rounded up to a
power of two, BLOCK the tokens of a block. TAIL: the last block is short. GROUP: query heads per KV
head. SHARED: one layout for all heads. Offsets are 64 bits wide: tokens times stride exceeds 32
bits at tens of millions of tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language import tensor

_LOG2_E = tl.constexpr(1 / math.log(2))
_LOG_2 = tl.constexpr(math.log(2))


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_jit
def _locate(
    rows: tensor, heads: tensor, order: tensor, PARTS: tl.constexpr, SHARED: tl.constexpr
) -> tensor:
    """Return batch, head, layout and block of this program, and its part of the block."""
    program = tl.program_id(0)
    part = program % PARTS
    position = program // PARTS
    head = (position // rows % heads).to(tl.int64)
    batch = (position // rows // heads).to(tl.int64)
    layout = head * 0 if SHARED else head
    block = tl.load(order + layout * rows + position % rows).to(tl.int64)
    return batch, head, layout, block, part


@_jit
def _load_span(indptr: tensor, layout: tensor, rows: tensor, row: tensor) -> tensor:
    """Return the start and end of a row's blocks in the list."""
    own = indptr + layout * (rows + 1) + row
    return tl.load(own), tl.load(own + 1)


@_jit
def _tile_pointers(
    base: tensor, first: tensor, stride: tensor, ROWS: tl.constexpr, WIDE: tl.constexpr
) -> tensor:
    """Return addresses of ROWS tokens of one head from token `first`, (ROWS, WIDE)."""
    tokens = tl.arange(0, ROWS).to(tl.int64) * stride
    return base + first * stride + tokens[:, None] + tl.arange(0, WIDE)[None, :]


@_jit
def _tile_mask(
    first: tensor, seq_len: tensor, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr
) -> tensor:
    """Return True for elements within the sequence and the head, (ROWS, WIDE)."""
    tokens = first + tl.arange(0, ROWS)
    return (tokens < seq_len)[:, None] & (tl.arange(0, WIDE) < DIM)[None, :]


@_jit
def _load(
    base: tensor, first: tensor, stride: tensor, seq_len: tensor, ROWS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load ROWS tokens of one head from `first`, (ROWS, WIDE).

    Elements beyond the head and, with TAIL, beyond the sequence are 0.
    """
    at = _tile_pointers(base, first, stride, ROWS, WIDE)
    if TAIL:
        return tl.load(at, mask=_tile_mask(first, seq_len, ROWS, DIM, WIDE), other=0.0)
    if WIDE != DIM:
        return tl.load(at, mask=(tl.arange(0, WIDE) < DIM)[None, :], other=0.0)
    return tl.load(at)


@_jit
def _store(
    base: tensor, first: tensor, stride: tensor, seq_len: tensor, numbers: tensor,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Store ROWS tokens of one head from `first`, except beyond the sequence or head_dim."""
    at = _tile_pointers(base, first, stride, ROWS, WIDE)
    inside = _tile_mask(first, seq_len, ROWS, DIM, WIDE)
    tl.store(at, numbers.to(base.dtype.element_ty), mask=inside)


@_jit
def _load_row(
    base: tensor, first: tensor, seq_len: tensor, other: tensor, ROWS: tl.constexpr,
    TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load one number per token of one head; `other` beyond the sequence."""
    tokens = first + tl.arange(0, ROWS)
    if TAIL:
        return tl.load(base + tokens, mask=tokens < seq_len, other=other)
    return tl.load(base + tokens)


@_jit
def _load_lse(
    base: tensor, first: tensor, seq_len: tensor, ROWS: tl.constexpr, TAIL: tl.constexpr
) -> tensor:
    """Load log-sum-exps in base 2; queries that see nothing get +inf, so that weights are 0."""
    lse = _load_row(base, first, seq_len, float("inf"), ROWS, TAIL)
    return tl.where(lse == float("-inf"), float("inf"), lse) * _LOG2_E


@_jit
def _pair_mask(
    query: tensor, key: tensor, seq_len: tensor, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return True where a query from token `query` sees a key from token `key`, (M, N)."""
    keys = key + tl.arange(0, N)
    visible = (keys < seq_len)[None, :]
    if CAUSAL:
        queries = query + tl.arange(0, M)
        visible = visible & (keys[None, :] <= queries[:, None])
    return visible


@_jit
def _end_of_unmasked(
    indices: tensor, end: tensor, block: tensor, rows: tensor, CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return the end of a row's key blocks that need no mask: the row's end or one before it."""
    if CAUSAL:
        return end - (tl.load(indices + end - 1) == block).to(tl.int64)
    if TAIL:
        return end - (tl.load(indices + end - 1) == rows - 1).to(tl.int64)
    return end


@_jit
def _count_keys_of_last(
    query: tensor, key: tensor, seq_len: tensor, BLOCK: tl.constexpr, M: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Count the keys of a row's last block, from token `key`, that any query sees."""
    if CAUSAL:
        return tl.minimum(query + M, seq_len) - key
    return tl.minimum(seq_len - key, BLOCK)


@_jit
def _attend(
    q: tensor, sums: tensor, row_max: tensor, row_sum: tensor, k: tensor, v: tensor,
    k_stride: tensor, v_stride: tensor, indices: tensor, begin: tensor, end: tensor,
    query: tensor, seq_len: tensor, scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Continue the online softmax over the tiles [begin, end) of a list of key blocks."""
    PARTS: tl.constexpr = BLOCK // N
    for tile in range(begin, end):
        key = tl.load(indices + tile // PARTS).to(tl.int64) * BLOCK + tile % PARTS * N
        keys = _load(k, key, k_stride, seq_len, N, DIM, WIDE, MASKED)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(_pair_mask(query, key, seq_len, M, N, CAUSAL), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        sums = sums * rescale[:, None]
        values = _load(v, key, v_stride, seq_len, N, DIM, WIDE, MASKED)
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        row_max = new_max
    return sums, row_max, row_sum


@_jit
def forward(
    q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, indptr: tensor, indices: tensor,
    order: tensor, q_strides: tl.tuple, k_strides: tl.tuple, v_strides: tl.tuple,
    out_strides: tl.tuple, seq_len: tensor, rows: tensor, heads: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KEEP_LSE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute the output and log-sum-exp of M queries of one head."""
    PARTS: tl.constexpr = BLOCK // N
    batch, head, layout, block, part = _locate(rows, heads, order, BLOCK // M, SHARED)
    begin, end = _load_span(indptr, layout, rows, block)
    query = block * BLOCK + part * M
    own = _load(
        q + batch * q_strides[0] + head * q_strides[1], query, q_strides[2], seq_len,
        M, DIM, WIDE, TAIL,
    )  # fmt: skip
    k += batch * k_strides[0] + head // GROUP * k_strides[1]
    v += batch * v_strides[0] + head // GROUP * v_strides[1]
    scale = scale * _LOG2_E
    sums = tl.zeros([M, WIDE], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    unmasked = _end_of_unmasked(indices, end, block, rows, CAUSAL, TAIL)
    sums, row_max, row_sum = _attend(
        own, sums, row_max, row_sum, k, v, k_strides[2], v_strides[2], indices,
        begin * PARTS, unmasked * PARTS, query, seq_len, scale,
        BLOCK, DIM, WIDE, CAUSAL, False, M, N,
    )  # fmt: skip
    if CAUSAL or TAIL:
        last = tl.load(indices + end - 1).to(tl.int64) * BLOCK
        keys = _count_keys_of_last(query, last, seq_len, BLOCK, M, CAUSAL) * (end - unmasked)
        sums, row_max, row_sum = _attend(
            own, sums, row_max, row_sum, k, v, k_strides[2], v_strides[2], indices,
            unmasked * PARTS, unmasked * PARTS + tl.cdiv(keys, N), query, seq_len, scale,
            BLOCK, DIM, WIDE, CAUSAL, True, M, N,
        )  # fmt: skip
    out += batch * out_strides[0] + head * out_strides[1]
    _store(out, query, out_strides[2], seq_len, sums / row_sum[:, None], M, DIM, WIDE)
    if KEEP_LSE:
        tokens = query + tl.arange(0, M)
        lse += (batch * heads + head) * seq_len
        tl.store(lse + tokens, (row_max + tl.log2(row_sum)) * _LOG_2, mask=tokens < seq_len)


@_jit
def _add_to_dq(
    dq: tensor, q: tensor, grad: tensor, lse: tensor, delta: tensor, k: tensor, v: tensor,
    k_stride: tensor, v_stride: tensor, indices: tensor, begin: tensor, end: tensor, query: tensor,
    seq_len: tensor, scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Add to dQ, unscaled, from the tiles [begin, end) of a list of key blocks."""
    PARTS: tl.constexpr = BLOCK // N
    for tile in range(begin, end):
        key = tl.load(indices + tile // PARTS).to(tl.int64) * BLOCK + tile % PARTS * N
        keys = _load(k, key, k_stride, seq_len, N, DIM, WIDE, MASKED)
        values = _load(v, key, v_stride, seq_len, N, DIM, WIDE, MASKED)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(_pair_mask(query, key, seq_len, M, N, CAUSAL), scores, float("-inf"))
        weights = tl.exp2(scores - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(values), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None])
        dq = tl.dot(grad_scores.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@_jit
def backward_queries(
    q: tensor, k: tensor, v: tensor, out: tensor, grad_out: tensor, lse: tensor, delta: tensor,
    dq: tensor, indptr: tensor, indices: tensor, order: tensor, q_strides: tl.tuple,
    k_strides: tl.tuple, v_strides: tl.tuple, out_strides: tl.tuple, grad_strides: tl.tuple,
    dq_strides: tl.tuple, seq_len: tensor, rows: tensor, heads: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute dQ of M queries of one head, and delta, the sum of out * grad_out, for dK."""
    PARTS: tl.constexpr = BLOCK // N
    batch, head, layout, block, part = _locate(rows, heads, order, BLOCK // M, SHARED)
    begin, end = _load_span(indptr, layout, rows, block)
    query = block * BLOCK + part * M
    q += batch * q_strides[0] + head * q_strides[1]
    out += batch * out_strides[0] + head * out_strides[1]
    grad_out += batch * grad_strides[0] + head * grad_strides[1]
    k += batch * k_strides[0] + head // GROUP * k_strides[1]
    v += batch * v_strides[0] + head // GROUP * v_strides[1]
    grad = _load(grad_out, query, grad_strides[2], seq_len, M, DIM, WIDE, TAIL)
    outs = _load(out, query, out_strides[2], seq_len, M, DIM, WIDE, TAIL)
    own_delta = tl.sum(outs.to(tl.float32) * grad.to(tl.float32), 1)
    tokens = query + tl.arange(0, M)
    row = (batch * heads + head) * seq_len
    tl.store(delta + row + tokens, own_delta, mask=tokens < seq_len)
    own_lse = _load_lse(lse + row, query, seq_len, M, TAIL)
    own = _load(q, query, q_strides[2], seq_len, M, DIM, WIDE, TAIL)
    sums = tl.zeros([M, WIDE], tl.float32)
    unmasked = _end_of_unmasked(indices, end, block, rows, CAUSAL, TAIL)
    sums = _add_to_dq(
        sums, own, grad, own_lse, own_delta, k, v, k_strides[2], v_strides[2], indices,
        begin * PARTS, unmasked * PARTS, query, seq_len, scale * _LOG2_E,
        BLOCK, DIM, WIDE, CAUSAL, False, M, N,
    )  # fmt: skip
    if CAUSAL or TAIL:
        last = tl.load(indices + end - 1).to(tl.int64) * BLOCK
        keys = _count_keys_of_last(query, last, seq_len, BLOCK, M, CAUSAL) * (end - unmasked)
        sums = _add_to_dq(
            sums, own, grad, own_lse, own_delta, k, v, k_strides[2], v_strides[2], indices,
            unmasked * PARTS, unmasked * PARTS + tl.cdiv(keys, N), query, seq_len, scale * _LOG2_E,
            BLOCK, DIM, WIDE, CAUSAL, True, M, N,
        )  # fmt: skip
    dq += batch * dq_strides[0] + head * dq_strides[1]
    _store(dq, query, dq_strides[2], seq_len, sums * scale, M, DIM, WIDE)


@_jit
def _add_to_dkv(
    dk: tensor, dv: tensor, k: tensor, v: tensor, q: tensor, grad_out: tensor, q_stride: tensor,
    grad_stride: tensor, lse: tensor, delta: tensor, indices: tensor, begin: tensor, end: tensor,
    key: tensor, seq_len: tensor, scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Add to dK, unscaled, and dV of N keys from the tiles [begin, end) of a list of query blocks.

    Scores are transposed, (N, M).
    """
    PARTS: tl.constexpr = BLOCK // M
    for tile in range(begin, end):
        query = tl.load(indices + tile // PARTS).to(tl.int64) * BLOCK + tile % PARTS * M
        queries = _load(q, query, q_stride, seq_len, M, DIM, WIDE, TAIL)
        grad = _load(grad_out, query, grad_stride, seq_len, M, DIM, WIDE, TAIL)
        row_lse = _load_lse(lse, query, seq_len, M, TAIL)
        row_delta = _load_row(delta, query, seq_len, 0.0, M, TAIL)
        scores = tl.dot(k, tl.trans(queries), input_precision="ieee") * scale
        if CAUSAL:
            later = (key + tl.arange(0, N))[:, None] > (query + tl.arange(0, M))[None, :]
            scores = tl.where(later, float("-inf"), scores)
        weights = tl.exp2(scores - row_lse[None, :])
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_scores = weights * (grad_weights - row_delta[None, :])
        dk = tl.dot(grad_scores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@_jit
def _unmasked_queries(
    indices: tensor, begin: tensor, end: tensor, block: tensor, rows: tensor, CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return start and end of a column's query blocks that need no mask.

    They come after the diagonal block and before the short last block.
    """
    start = begin
    if CAUSAL:
        first = tl.load(indices + begin, mask=begin < end, other=-1)
        start = begin + (first == block).to(tl.int64)
    stop = end
    if TAIL:
        last = tl.load(indices + end - 1, mask=start < end, other=-1)
        stop = end - (last == rows - 1).to(tl.int64)
    return start, stop


@_jit
def backward_keys(
    q: tensor, k: tensor, v: tensor, grad_out: tensor, lse: tensor, delta: tensor, dk: tensor,
    dv: tensor, indptr: tensor, indices: tensor, order: tensor, q_strides: tl.tuple,
    k_strides: tl.tuple, v_strides: tl.tuple, grad_strides: tl.tuple, dk_strides: tl.tuple,
    dv_strides: tl.tuple, seq_len: tensor, rows: tensor, heads: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute dK and dV of N keys of one KV head from every query head of its group."""
    PARTS: tl.constexpr = BLOCK // M
    batch, head, layout, block, part = _locate(rows, heads // GROUP, order, BLOCK // N, True)
    key = block * BLOCK + part * N
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    keys = _load(k, key, k_strides[2], seq_len, N, DIM, WIDE, TAIL)
    values = _load(v, key, v_strides[2], seq_len, N, DIM, WIDE, TAIL)
    k_sums = tl.zeros([N, WIDE], tl.float32)
    v_sums = tl.zeros([N, WIDE], tl.float32)
    for member in range(GROUP):
        q_head = head * GROUP + member
        begin, end = _load_span(indptr, layout if SHARED else q_head, rows, block)
        row = (batch * heads + q_head) * seq_len
        q_own = q + batch * q_strides[0] + q_head * q_strides[1]
        grad_own = grad_out + batch * grad_strides[0] + q_head * grad_strides[1]
        start, stop = _unmasked_queries(indices, begin, end, block, rows, CAUSAL, TAIL)
        if CAUSAL:
            first = begin * PARTS + part * N // M
            k_sums, v_sums = _add_to_dkv(
                k_sums, v_sums, keys, values, q_own, grad_own, q_strides[2], grad_strides[2],
                lse + row, delta + row, indices, first, start * PARTS, key, seq_len,
                scale * _LOG2_E, BLOCK, DIM, WIDE, TAIL, True, M, N,
            )  # fmt: skip
        k_sums, v_sums = _add_to_dkv(
            k_sums, v_sums, keys, values, q_own, grad_own, q_strides[2], grad_strides[2],
            lse + row, delta + row, indices, start * PARTS, stop * PARTS, key, seq_len,
            scale * _LOG2_E, BLOCK, DIM, WIDE, False, False, M, N,
        )  # fmt: skip
        if TAIL:
            k_sums, v_sums = _add_to_dkv(
                k_sums, v_sums, keys, values, q_own, grad_own, q_strides[2], grad_strides[2],
                lse + row, delta + row, indices, stop * PARTS, end * PARTS, key, seq_len,
                scale * _LOG2_E, BLOCK, DIM, WIDE, True, False, M, N,
            )  # fmt: skip
    dk += batch * dk_strides[0] + head * dk_strides[1]
    dv += batch * dv_strides[0] + head * dv_strides[1]
    _store(dk, key, dk_strides[2], seq_len, k_sums * scale, N, DIM, WIDE)
    _store(dv, key, dv_strides[2], seq_len, v_sums, N, DIM, WIDE)
