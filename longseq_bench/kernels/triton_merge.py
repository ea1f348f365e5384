"""Triton kernel that moves rows of tensors, or merges two softmaxes, in one launch; see merge.py.

Needs triton: import it where it is used. Under TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from longseq_bench.kernels.base import with_dense_rows
from longseq_bench.kernels.triton_kernels import jit, load, store
from longseq_bench.kernels.triton_tiles import on_device

ROWS = 32
"""Rows of a program."""


@jit
def _move(
    targets: tl.tuple, sources: tl.tuple, index: tensor, target_strides: tl.tuple,
    source_strides: tl.tuple, index_strides: tl.tuple, sizes: tl.tuple, heads: tensor,
    index_heads: tensor, tiles: tensor, WIDE: tl.constexpr, M: tl.constexpr, TAKE: tl.constexpr,
    PUT: tl.constexpr, ADD: tl.constexpr, MERGE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Move M rows of one head of each source to its target.

    sizes: heads, rows and columns of each.  TAKE, PUT: sources, or targets, have an index.  MERGE:
    a softmax, whose first tensor is the log-sum-exp.
    """
    program = tl.program_id(0)
    rows = (program % tiles).to(tl.int64) * M + tl.arange(0, M)
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    columns = tl.arange(0, WIDE)[None, :]
    places = rows
    if TAKE or PUT:
        index += batch * index_strides[0] + head % index_heads * index_strides[1]
        places = tl.load(index + rows * index_strides[2], mask=rows < sizes[1], other=0)
    for i in tl.static_range(len(targets)):
        inside = rows < tl.where(head < sizes[3 * i], sizes[3 * i + 1], 0)
        source = sources[i] + batch * source_strides[3 * i] + head * source_strides[3 * i + 1]
        target = targets[i] + batch * target_strides[3 * i] + head * target_strides[3 * i + 1]
        source += (places if TAKE else rows) * source_strides[3 * i + 2]
        target += (places if PUT else rows) * target_strides[3 * i + 2]
        if MERGE and i == 0:
            old = tl.load(target, mask=inside, other=float("-inf"))
            new = tl.load(source, mask=inside, other=float("-inf"))
            larger = tl.maximum(old, new, propagate_nan=tl.PropagateNan.ALL)
            # rows without any key stay 0 and -inf
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            old_weight, new_weight = tl.exp(old - shift), tl.exp(new - shift)
            total = old_weight + new_weight
            share = tl.where(total == 0, 0.0, new_weight / total)
            # several warps load the same rows, and one of them stores: not before all have loaded
            tl.debug_barrier()
            tl.store(target, shift + tl.log(total), mask=inside)
        else:
            mask = inside[:, None] & (columns < sizes[3 * i + 2])
            value = tl.load(source[:, None] + columns, mask=mask, other=0.0)
            if ADD or MERGE:
                own = tl.load(target[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
                value = value.to(tl.float32)
                value = own + share[:, None] * (value - own) if MERGE else own + value
                tl.debug_barrier()
            tl.store(target[:, None] + columns, value, mask=mask)


def move(
    targets: Sequence[Tensor], sources: Sequence[Tensor], index: Tensor | None = None,
    mode: Literal["take", "put", "add", "merge"] = "put",
) -> None:  # fmt: skip
    """Copy the rows of each source (B, H, M, D) or (B, H, M) to its target, or add or merge them.

    index: of the rows of the targets, each once, or (take) of the sources, as in merge.py.
    None: targets are like sources.  merge: the log-sum-exp and the output of a softmax.
    """
    sources = [with_dense_rows(t) if t.dim() == 4 else t for t in sources]
    takes, moved = mode == "take", targets if mode == "take" else sources
    sizes = [(t.shape[1], t.shape[2], t.shape[3:].numel()) for t in moved]
    heads, rows, widest = (max(of_all) for of_all in zip(*sizes, strict=True))
    tiles = -(-rows // ROWS)
    if not (programs := moved[0].shape[0] * heads * tiles):
        return
    places = targets[0] if index is None else index  # not read without an index
    # 0 where one sequence or head serves all
    strides = (
        tuple(t.stride(i) * (t.shape[i] > 1) for t in tensors for i in range(3))
        for tensors in (targets, sources, (places,))
    )
    with on_device(places):
        _move[(programs,)](
            tuple(targets), tuple(sources), places, *strides, tuple(chain(*sizes)), heads,
            places.shape[1], tiles, WIDE=triton.next_power_of_2(widest), M=ROWS, TAKE=takes,
            PUT=index is not None and not takes, ADD=mode == "add", MERGE=mode == "merge",
        )  # fmt: skip


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
