"""Triton kernels that join the partial results of split rows and columns; see triton_kernels.py.

splits: (layouts, rows, 3), for each split row or column its block, its first slot and the number of
its slots. Slots are added in one order, so every run gives the same bits.
"""

import triton.language as tl
from triton.language import tensor

from longseq_bench.kernels.triton_kernels import jit, load, store


@jit
def _locate_split(
    splits: tensor, rows: tensor, heads: tensor, PARTS: tl.constexpr, SHARED: tl.constexpr
) -> tensor:
    """Return batch, head, layout and part of this program, and block, first slot and slots."""
    program = tl.program_id(0)
    part = program % PARTS
    position = program // PARTS
    head = (position // rows % heads).to(tl.int64)
    batch = (position // rows // heads).to(tl.int64)
    layout = head * 0 if SHARED else head
    own = splits + 3 * (layout * rows + position % rows)
    block = tl.load(own).to(tl.int64)
    return batch, head, layout, part, block, tl.load(own + 1).to(tl.int64), tl.load(own + 2)


@jit
def reduce_softmax(
    out: tensor, lse: tensor, parts: tensor, parts_lse: tensor, splits: tensor,
    out_strides: tl.tuple, seq_len: tensor, rows: tensor, heads: tensor, slots: tensor,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, KEEP_LSE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Join the slots of M queries of one split row of one head by their log-sum-exp.

    rows: split rows of a layout.  splits: block, first slot and number of slots of each.
    """
    batch, head, _, part, block, first, count = _locate_split(
        splits, rows, heads, BLOCK // M, SHARED
    )
    if count == 0:
        return
    of_head = batch * heads + head
    sums = tl.zeros([M, WIDE], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    for slot in range(first, first + count):
        own_slot = (of_head * slots + slot) * BLOCK
        own_lse = tl.load(parts_lse + own_slot + part * M + tl.arange(0, M))
        own = load(parts + own_slot * DIM, part * M, DIM, BLOCK, M, DIM, WIDE, False)
        new_max = tl.maximum(row_max, own_lse)
        weight, rescale = tl.exp(own_lse - new_max), tl.exp(row_max - new_max)
        sums = sums * rescale[:, None] + own * weight[:, None]
        row_sum = row_sum * rescale + weight
        row_max = new_max
    query = block * BLOCK + part * M
    out += batch * out_strides[0] + head * out_strides[1]
    store(out, query, out_strides[2], seq_len, sums / row_sum[:, None], M, DIM, WIDE)
    if KEEP_LSE:
        tokens = query + tl.arange(0, M)
        joint = row_max + tl.log(row_sum)
        tl.store(lse + of_head * seq_len + tokens, joint, mask=tokens < seq_len)


@jit
def reduce_sum(
    total: tensor, parts: tensor, splits: tensor, strides: tl.tuple, seq_len: tensor, rows: tensor,
    heads: tensor, slots: tensor, SHARED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, M: tl.constexpr,
) -> tensor:  # fmt: skip
    """Add up the slots of M tokens of one split row or column of one head, in one order."""
    batch, head, _, part, block, first, count = _locate_split(
        splits, rows, heads, BLOCK // M, SHARED
    )
    if count == 0:
        return
    sums = tl.zeros([M, WIDE], tl.float32)
    for slot in range(first, first + count):
        own_slot = ((batch * heads + head) * slots + slot) * BLOCK
        sums += load(parts + own_slot * DIM, part * M, DIM, BLOCK, M, DIM, WIDE, False)
    total += batch * strides[0] + head * strides[1]
    store(total, block * BLOCK + part * M, strides[2], seq_len, sums, M, DIM, WIDE)
