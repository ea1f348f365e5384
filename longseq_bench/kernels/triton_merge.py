"""Triton kernel that merges two softmaxes over different keys in one launch; see merge.py.

Needs triton: import it where it is used. Under TRITON_INTERPRET=1 it runs on CPU tensors.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from longseq_bench.kernels.base import with_dense_rows
from longseq_bench.kernels.triton_kernels import jit, load, store
from longseq_bench.kernels.triton_tiles import Launch, on_device

ROWS = 32
"""Rows of a program."""


@jit
def _merge(
    out: tensor, lse: tensor, part: tensor, part_lse: tensor, index: tensor,
    out_strides: tl.tuple, lse_strides: tl.tuple, part_strides: tl.tuple,
    part_lse_strides: tl.tuple, index_strides: tl.tuple, seq_len: tensor, heads: tensor,
    tiles: tensor, DIM: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, INDEXED: tl.constexpr,
) -> tensor:  # fmt: skip
    """Merge M rows of one head."""
    program = tl.program_id(0)
    rows = (program % tiles).to(tl.int64) * M + tl.arange(0, M)
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    inside = rows < seq_len
    places = rows
    if INDEXED:
        index += batch * index_strides[0] + head * index_strides[1]
        places = tl.load(index + rows * index_strides[2], mask=inside, other=0)
    lse += batch * lse_strides[0] + head * lse_strides[1]
    part_lse += batch * part_lse_strides[0] + head * part_lse_strides[1]
    old = tl.load(lse + places * lse_strides[2], mask=inside, other=float("-inf"))
    new = tl.load(part_lse + rows * part_lse_strides[2], mask=inside, other=float("-inf"))
    dims = tl.arange(0, WIDE)
    mask = inside[:, None] & (dims < DIM)[None, :]
    out += batch * out_strides[0] + head * out_strides[1]
    part += batch * part_strides[0] + head * part_strides[1]
    at = out + places[:, None] * out_strides[2] + dims[None, :]
    sums = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    own = tl.load(part + rows[:, None] * part_strides[2] + dims[None, :], mask=mask, other=0.0)
    larger = tl.maximum(old, new, propagate_nan=tl.PropagateNan.ALL)
    # rows without any key stay 0 and -inf
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    old_weight, new_weight = tl.exp(old - shift), tl.exp(new - shift)
    total = old_weight + new_weight
    share = tl.where(total == 0, 0.0, new_weight / total)
    # several warps load the same rows, and one of them stores: not before all have loaded
    tl.debug_barrier()
    tl.store(lse + places * lse_strides[2], shift + tl.log(total), mask=inside)
    tl.store(at, sums + share[:, None] * (own.to(tl.float32) - sums), mask=mask)


def merge(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, index: Tensor | None = None
) -> None:
    """Merge part (B, H, M, D) and part_lse (B, H, M) into out and lse, in place.

    index: as in merge.py; out and lse have 1 instead of B then.
    """
    batch, heads, tokens, dim = part.shape
    part, tiles = with_dense_rows(part), -(-tokens // ROWS)
    programs = batch * heads * tiles
    if not programs:
        return
    places = lse if index is None else index  # not read without an index
    tensors = out, lse, part, part_lse, places
    # one sequence for all of the batch, and one row of places for all heads
    strides = [tuple(t.stride(i) * (t.shape[i] > 1) for i in range(3)) for t in tensors]
    widths = {"DIM": dim, "WIDE": triton.next_power_of_2(dim), "M": ROWS}
    constants = widths | {"INDEXED": index is not None}
    launch = Launch(_merge, programs, (*strides, tokens, heads, tiles), constants)
    with on_device(out):
        launch(*tensors)


# ---- partial results of split rows and columns; see triton_kernels.py ----------------------------
# splits: (layouts, rows, 3), for each split row or column its block, its first slot and the number
# of its slots. Slots are added in one order, so every run gives the same bits.


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
