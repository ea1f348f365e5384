"""Triton kernels of block-sparse attention; triton_blocks.py launches them.

FlashAttention-2 (arXiv 2307.08691): online softmax forward; backward from the output and the
log-sum-exp, one kernel for dQ over the rows of the layout, one for dK and dV over its columns.

A work item is a part of the list of a row or column. Long lists are split into several items, which
write partial results to slots; triton_merge.py joins them. The index of the next block is loaded
one turn ahead, so that its keys can be loaded while the current ones are multiplied.

In kernels M and N are the queries and keys of one tile, WIDE is head_dim (DIM) rounded up to a
power of two, BLOCK the tokens of a block. TAIL: the last block is short. GROUP: query heads per KV
head. SHARED: one layout for all heads. SPLIT: some items write to slots. Which blocks of an item
need a mask comes with the item. Offsets are 64 bits wide: tokens times stride exceeds 32 bits at
tens of millions of tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language import tensor

_LOG2_E = tl.constexpr(1 / math.log(2))
_LOG_2 = tl.constexpr(math.log(2))

_SIZES = ["seq_len", "rows", "heads", "items", "slots", "tiles", "sizes"]
"""Sizes that a kernel is not compiled again for; Triton would for multiples of 16 and for 1."""


def jit(function: Callable[..., Any]) -> Any:
    """Let Triton compile a function, but not again for other sizes."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(do_not_specialize=[name for name in _SIZES if name in names])(function)


@jit
def _locate(
    places: tensor, bounds: tensor, items: tensor, heads: tensor, PARTS: tl.constexpr,
    SHARED: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return batch, head and part of this program, and block, slot and bounds of its item."""
    program = tl.program_id(0)
    part = program % PARTS
    position = program // PARTS
    head = (position // items % heads).to(tl.int64)
    batch = (position // items // heads).to(tl.int64)
    layout = head * 0 if SHARED else head
    item = 2 * (layout * items + position % items)
    block = tl.load(places + item).to(tl.int64)
    slot = tl.load(places + item + 1).to(tl.int64)
    begin = tl.load(bounds + 2 * item)
    start = tl.load(bounds + 2 * item + 1)
    stop = tl.load(bounds + 2 * item + 2)
    end = tl.load(bounds + 2 * item + 3)
    return batch, head, part, block, slot, begin, start, stop, end


@jit
def _tile_pointers(
    base: tensor, first: tensor, stride: tensor, ROWS: tl.constexpr, WIDE: tl.constexpr
) -> tensor:
    """Return addresses of ROWS tokens of one head from token `first`, (ROWS, WIDE)."""
    tokens = tl.arange(0, ROWS).to(tl.int64) * stride
    return base + first * stride + tokens[:, None] + tl.arange(0, WIDE)[None, :]


@jit
def _tile_mask(
    first: tensor, seq_len: tensor, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr
) -> tensor:
    """Return True for elements within the sequence and the head, (ROWS, WIDE)."""
    tokens = first + tl.arange(0, ROWS)
    return (tokens < seq_len)[:, None] & (tl.arange(0, WIDE) < DIM)[None, :]


@jit
def load(
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


@jit
def store(
    base: tensor, first: tensor, stride: tensor, seq_len: tensor, numbers: tensor,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Store ROWS tokens of one head from `first`, except beyond the sequence or head_dim."""
    at = _tile_pointers(base, first, stride, ROWS, WIDE)
    inside = _tile_mask(first, seq_len, ROWS, DIM, WIDE)
    tl.store(at, numbers.to(base.dtype.element_ty), mask=inside)


@jit
def _load_row(
    base: tensor, first: tensor, seq_len: tensor, other: tensor, ROWS: tl.constexpr,
    TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load one number per token of one head; `other` beyond the sequence."""
    tokens = first + tl.arange(0, ROWS)
    if TAIL:
        return tl.load(base + tokens, mask=tokens < seq_len, other=other)
    return tl.load(base + tokens)


@jit
def _load_lse(
    base: tensor, first: tensor, seq_len: tensor, ROWS: tl.constexpr, TAIL: tl.constexpr
) -> tensor:
    """Load log-sum-exps in base 2; queries that see nothing get +inf, so that weights are 0."""
    lse = _load_row(base, first, seq_len, float("inf"), ROWS, TAIL)
    return tl.where(lse == float("-inf"), float("inf"), lse) * _LOG2_E


@jit
def _pair_mask(
    query: tensor, key: tensor, seq_len: tensor, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, TAIL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return True where a query from token `query` sees a key from token `key`, (M, N)."""
    keys = key + tl.arange(0, N)
    queries = query + tl.arange(0, M)
    if CAUSAL and TAIL:
        return keys[None, :] <= tl.minimum(queries, seq_len - 1)[:, None]
    if CAUSAL:
        return keys[None, :] <= queries[:, None]
    return (keys < seq_len)[None, :] & (queries >= 0)[:, None]


@jit
def _count_keys_of_last(
    query: tensor, key: tensor, seq_len: tensor, BLOCK: tl.constexpr, M: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Count the keys of a row's last block, from token `key`, that any query sees."""
    if CAUSAL:
        return tl.minimum(tl.minimum(query + M, seq_len) - key, BLOCK)
    return tl.minimum(seq_len - key, BLOCK)


@jit
def capped(products: tensor, CAP: tl.constexpr) -> tensor:
    """Return CAP * tanh(products / CAP); 0: no cap. Near 0, where exponentials cancel: series."""
    if CAP == 0:
        return products
    x = products / CAP
    size, y = tl.abs(x), x * x
    e = tl.exp2(-2 * size * _LOG2_E)
    large = tl.where(x < 0, e - 1, 1 - e) / (1 + e)
    series = ((62 / 2835 * y - 17 / 315) * y + 2 / 15) * y - 1 / 3
    return tl.where(size < 0.25, x + x * y * series, large) * CAP


@jit
def _attend(
    q: tensor, sums: tensor, row_max: tensor, row_sum: tensor, k: tensor, v: tensor,
    k_stride: tensor, v_stride: tensor, indices: tensor, begin: tensor, end: tensor,
    query: tensor, seq_len: tensor, scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, CAP: tl.constexpr,
) -> tensor:  # fmt: skip
    """Continue the online softmax over the tiles [begin, end) of a list of key blocks.

    CAUSAL, TAIL: whether these tiles need that mask.
    """
    PARTS: tl.constexpr = BLOCK // N
    block = tl.load(indices + begin // PARTS, mask=begin < end, other=0)
    for tile in range(begin, end):
        key = block.to(tl.int64) * BLOCK + tile % PARTS * N
        block = tl.load(indices + tl.minimum(tile + 1, end - 1) // PARTS)
        keys = load(k, key, k_stride, seq_len, N, DIM, WIDE, TAIL)
        scores = capped(tl.dot(q, tl.trans(keys), input_precision="ieee"), CAP)
        if CAUSAL or TAIL:
            mask = _pair_mask(query, key, seq_len, M, N, CAUSAL, TAIL)
            scores = tl.where(mask, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        # one multiplication and addition per score
        weights = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        sums = sums * rescale[:, None]
        values = load(v, key, v_stride, seq_len, N, DIM, WIDE, TAIL)
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        row_max = new_max
    return sums, row_max, row_sum


@jit
def forward(
    q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, parts: tensor, parts_lse: tensor,
    places: tensor, bounds: tensor, indices: tensor, q_strides: tl.tuple, k_strides: tl.tuple,
    v_strides: tl.tuple, out_strides: tl.tuple, seq_len: tensor, heads: tensor, items: tensor,
    slots: tensor, scale: tensor, GROUP: tl.constexpr, SHARED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr, KEEP_LSE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute the output and log-sum-exp of M queries of one head, or of a part of their keys."""
    PARTS: tl.constexpr = BLOCK // N
    batch, head, part, block, slot, begin, _, unmasked, end = _locate(
        places, bounds, items, heads, BLOCK // M, SHARED
    )
    query = block * BLOCK + part * M
    q += batch * q_strides[0] + head * q_strides[1]
    own = load(q, query, q_strides[2], seq_len, M, DIM, WIDE, TAIL)
    k += batch * k_strides[0] + head // GROUP * k_strides[1]
    v += batch * v_strides[0] + head // GROUP * v_strides[1]
    scale = scale * _LOG2_E
    sums = tl.zeros([M, WIDE], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    sums, row_max, row_sum = _attend(
        own, sums, row_max, row_sum, k, v, k_strides[2], v_strides[2], indices,
        begin * PARTS, unmasked * PARTS, query, seq_len, scale,
        BLOCK, DIM, WIDE, False, False, M, N, CAP,
    )  # fmt: skip
    if CAUSAL or TAIL:
        last = tl.load(indices + end - 1).to(tl.int64) * BLOCK
        keys = _count_keys_of_last(query, last, seq_len, BLOCK, M, CAUSAL) * (end - unmasked)
        sums, row_max, row_sum = _attend(
            own, sums, row_max, row_sum, k, v, k_strides[2], v_strides[2], indices,
            unmasked * PARTS, unmasked * PARTS + tl.cdiv(keys, N), query, seq_len, scale,
            BLOCK, DIM, WIDE, CAUSAL, TAIL, M, N, CAP,
        )  # fmt: skip
    tokens = query + tl.arange(0, M)
    of_head = batch * heads + head
    natural = (row_max + tl.log2(row_sum)) * _LOG_2
    sums = sums / row_sum[:, None]
    if SPLIT and slot >= 0:
        own_slot = (of_head * slots + slot) * BLOCK
        tl.store(parts_lse + own_slot + part * M + tl.arange(0, M), natural)
        store(parts + own_slot * DIM, part * M, DIM, BLOCK, sums, M, DIM, WIDE)
    else:
        out += batch * out_strides[0] + head * out_strides[1]
        store(out, query, out_strides[2], seq_len, sums, M, DIM, WIDE)
        if KEEP_LSE:
            tl.store(lse + of_head * seq_len + tokens, natural, mask=tokens < seq_len)


@jit
def _add_to_dq(
    dq: tensor, q: tensor, grad: tensor, lse: tensor, delta: tensor, k: tensor, v: tensor,
    k_stride: tensor, v_stride: tensor, indices: tensor, begin: tensor, end: tensor, query: tensor,
    seq_len: tensor, scale: tensor, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr,
) -> tensor:  # fmt: skip
    """Add to dQ, unscaled, from the tiles [begin, end) of a list of key blocks."""
    PARTS: tl.constexpr = BLOCK // N
    block = tl.load(indices + begin // PARTS, mask=begin < end, other=0)
    for tile in range(begin, end):
        key = block.to(tl.int64) * BLOCK + tile % PARTS * N
        block = tl.load(indices + tl.minimum(tile + 1, end - 1) // PARTS)
        keys = load(k, key, k_stride, seq_len, N, DIM, WIDE, TAIL)
        values = load(v, key, v_stride, seq_len, N, DIM, WIDE, TAIL)
        products = capped(tl.dot(q, tl.trans(keys), input_precision="ieee"), CAP)
        scores = products
        if CAUSAL or TAIL:
            mask = _pair_mask(query, key, seq_len, M, N, CAUSAL, TAIL)
            scores = tl.where(mask, scores, float("-inf"))
        weights = tl.exp2(scores * scale - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(values), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None])
        if CAP != 0:
            grad_scores *= 1 - products / CAP * (products / CAP)
        dq = tl.dot(grad_scores.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@jit
def backward_queries(
    q: tensor, k: tensor, v: tensor, out: tensor, grad_out: tensor, lse: tensor, delta: tensor,
    dq: tensor, parts: tensor, places: tensor, bounds: tensor, indices: tensor,
    q_strides: tl.tuple, k_strides: tl.tuple, v_strides: tl.tuple, out_strides: tl.tuple,
    grad_strides: tl.tuple, dq_strides: tl.tuple, seq_len: tensor,
    heads: tensor, items: tensor, slots: tensor, scale: tensor, GROUP: tl.constexpr,
    SHARED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute dQ of M queries of one head, and delta, the sum of out * grad_out, for dK.

    Every item of a split row writes the same delta.
    """
    PARTS: tl.constexpr = BLOCK // N
    batch, head, part, block, slot, begin, _, unmasked, end = _locate(
        places, bounds, items, heads, BLOCK // M, SHARED
    )
    query = block * BLOCK + part * M
    q += batch * q_strides[0] + head * q_strides[1]
    out += batch * out_strides[0] + head * out_strides[1]
    grad_out += batch * grad_strides[0] + head * grad_strides[1]
    k += batch * k_strides[0] + head // GROUP * k_strides[1]
    v += batch * v_strides[0] + head // GROUP * v_strides[1]
    grad = load(grad_out, query, grad_strides[2], seq_len, M, DIM, WIDE, TAIL)
    outs = load(out, query, out_strides[2], seq_len, M, DIM, WIDE, TAIL)
    own_delta = tl.sum(outs.to(tl.float32) * grad.to(tl.float32), 1)
    tokens = query + tl.arange(0, M)
    row = (batch * heads + head) * seq_len
    tl.store(delta + row + tokens, own_delta, mask=tokens < seq_len)
    own_lse = _load_lse(lse + row, query, seq_len, M, TAIL)
    own = load(q, query, q_strides[2], seq_len, M, DIM, WIDE, TAIL)
    sums = tl.zeros([M, WIDE], tl.float32)
    sums = _add_to_dq(
        sums, own, grad, own_lse, own_delta, k, v, k_strides[2], v_strides[2], indices,
        begin * PARTS, unmasked * PARTS, query, seq_len, scale * _LOG2_E,
        BLOCK, DIM, WIDE, False, False, M, N, CAP,
    )  # fmt: skip
    if CAUSAL or TAIL:
        last = tl.load(indices + end - 1).to(tl.int64) * BLOCK
        keys = _count_keys_of_last(query, last, seq_len, BLOCK, M, CAUSAL) * (end - unmasked)
        sums = _add_to_dq(
            sums, own, grad, own_lse, own_delta, k, v, k_strides[2], v_strides[2], indices,
            unmasked * PARTS, unmasked * PARTS + tl.cdiv(keys, N), query, seq_len, scale * _LOG2_E,
            BLOCK, DIM, WIDE, CAUSAL, TAIL, M, N, CAP,
        )  # fmt: skip
    if SPLIT and slot >= 0:
        own_slot = ((batch * heads + head) * slots + slot) * BLOCK * DIM
        store(parts + own_slot, part * M, DIM, BLOCK, sums * scale, M, DIM, WIDE)
    else:
        dq += batch * dq_strides[0] + head * dq_strides[1]
        store(dq, query, dq_strides[2], seq_len, sums * scale, M, DIM, WIDE)


@jit
def _locate_queries(
    indices: tensor, turn: tensor, BLOCK: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    M: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return the first query of a turn of a column's list, and its head's place in the group.

    Each block takes a turn per tile and, in a layout for all heads, per query head of the group.
    Otherwise the list has the head: block * GROUP + head.
    """
    PARTS: tl.constexpr = BLOCK // M
    if SHARED:
        block = tl.load(indices + turn // (PARTS * GROUP)).to(tl.int64)
        return block * BLOCK + turn // GROUP % PARTS * M, turn % GROUP
    code = tl.load(indices + turn // PARTS)
    block = (code // GROUP).to(tl.int64)
    return block * BLOCK + turn % PARTS * M, (code % GROUP).to(tl.int64)


@jit
def _add_to_dkv(
    dk: tensor, dv: tensor, k: tensor, v: tensor, q: tensor, grad_out: tensor, q_strides: tl.tuple,
    grad_strides: tl.tuple, lse: tensor, delta: tensor, indices: tensor, begin: tensor, end: tensor,
    gap: tensor, skipped: tensor, key: tensor, seq_len: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAP: tl.constexpr,
) -> tensor:  # fmt: skip
    """Add to dK, unscaled, and dV of N keys from the turns [begin, end) of a column's list.

    Turns from `gap` on come `skipped` turns later in the list. Scores are transposed, (N, M).
    """
    last = tl.maximum(end - 1, begin)
    at = begin + skipped * (begin >= gap).to(tl.int64)
    query, member = _locate_queries(indices, at, BLOCK, GROUP, SHARED, M)
    for turn in range(begin, end):
        own_query, own = query, member
        at = tl.minimum(turn + 1, last)
        at += skipped * (at >= gap).to(tl.int64)
        query, member = _locate_queries(indices, at, BLOCK, GROUP, SHARED, M)
        q_own, grad_own = q + own * q_strides[1], grad_out + own * grad_strides[1]
        queries = load(q_own, own_query, q_strides[2], seq_len, M, DIM, WIDE, TAIL)
        grad = load(grad_own, own_query, grad_strides[2], seq_len, M, DIM, WIDE, TAIL)
        row = own * seq_len.to(tl.int64)
        row_lse = _load_lse(lse + row, own_query, seq_len, M, TAIL)
        row_delta = _load_row(delta + row, own_query, seq_len, 0.0, M, TAIL)
        products = capped(tl.dot(k, tl.trans(queries), input_precision="ieee"), CAP)
        scores = products
        if CAUSAL:
            later = (key + tl.arange(0, N))[:, None] > (own_query + tl.arange(0, M))[None, :]
            scores = tl.where(later, float("-inf"), scores)
        weights = tl.exp2(scores * scale - row_lse[None, :])
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_scores = weights * (grad_weights - row_delta[None, :])
        if CAP != 0:
            grad_scores *= 1 - products / CAP * (products / CAP)
        dk = tl.dot(grad_scores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@jit
def backward_keys(
    q: tensor, k: tensor, v: tensor, grad_out: tensor, lse: tensor, delta: tensor, dk: tensor,
    dv: tensor, dk_parts: tensor, dv_parts: tensor, places: tensor, bounds: tensor,
    indices: tensor, q_strides: tl.tuple, k_strides: tl.tuple,
    v_strides: tl.tuple, grad_strides: tl.tuple, dk_strides: tl.tuple, dv_strides: tl.tuple,
    seq_len: tensor, heads: tensor, items: tensor, slots: tensor, scale: tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, TAIL: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute dK and dV of N keys of one KV head from every query head of its group."""
    TURNS: tl.constexpr = BLOCK // M * (GROUP if SHARED else 1)
    batch, head, part, block, slot, begin, start, stop, end = _locate(
        places, bounds, items, heads // GROUP, BLOCK // N, SHARED
    )
    key = block * BLOCK + part * N
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    q += batch * q_strides[0] + head * GROUP * q_strides[1]
    grad_out += batch * grad_strides[0] + head * GROUP * grad_strides[1]
    row = (batch * heads + head * GROUP) * seq_len
    keys = load(k, key, k_strides[2], seq_len, N, DIM, WIDE, TAIL)
    values = load(v, key, v_strides[2], seq_len, N, DIM, WIDE, TAIL)
    k_sums = tl.zeros([N, WIDE], tl.float32)
    v_sums = tl.zeros([N, WIDE], tl.float32)
    scale_2 = scale * _LOG2_E
    k_sums, v_sums = _add_to_dkv(
        k_sums, v_sums, keys, values, q, grad_out, q_strides, grad_strides, lse + row, delta + row,
        indices, start * TURNS, stop * TURNS, stop * TURNS, 0, key, seq_len, scale_2,
        GROUP, SHARED, BLOCK, DIM, WIDE, False, False, M, N, CAP,
    )  # fmt: skip
    if CAUSAL or TAIL:
        # the blocks before `start`, and those from `stop`
        masked = (end - begin - (stop - start)) * TURNS
        k_sums, v_sums = _add_to_dkv(
            k_sums, v_sums, keys, values, q, grad_out, q_strides, grad_strides, lse + row,
            delta + row, indices, begin * TURNS, begin * TURNS + masked, start * TURNS,
            (stop - start) * TURNS, key, seq_len, scale_2,
            GROUP, SHARED, BLOCK, DIM, WIDE, CAUSAL, TAIL, M, N, CAP,
        )  # fmt: skip
    if SPLIT and slot >= 0:
        own_slot = ((batch * (heads // GROUP) + head) * slots + slot) * BLOCK * DIM
        at = part * N
        store(dk_parts + own_slot, at, DIM, BLOCK, k_sums * scale, N, DIM, WIDE)
        store(dv_parts + own_slot, at, DIM, BLOCK, v_sums, N, DIM, WIDE)
    else:
        dk += batch * dk_strides[0] + head * dk_strides[1]
        dv += batch * dv_strides[0] + head * dv_strides[1]
        store(dk, key, dk_strides[2], seq_len, k_sums * scale, N, DIM, WIDE)
        store(dv, key, dv_strides[2], seq_len, v_sums, N, DIM, WIDE)
