"""Block-sparse attention on CUDA to the blocks with the highest scores, chosen there, in Triton.

No score and no list comes to the host, and nothing waits for the device: each row keeps a number of
blocks that its length determines, so that the places of all lists of rows are known before. Only a
backward pass needs the lists of columns, whose lengths are not. A column longer than a multiple of
the mean is split, as in work_items.py; its items come first.

The choice is that of attention/sparse/topk.py: the diagonal first, then by score; of equal scores
the first. Needs triton: import it where it is used.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor
from typing_extensions import override

from longseq_bench.kernels.sparse_selection import nan_error
from longseq_bench.kernels.triton_blocks import TritonBlocks
from longseq_bench.kernels.triton_kernels import jit
from longseq_bench.kernels.triton_tiles import Launch, on_device
from longseq_bench.kernels.work_items import MEANS, ROWS_PER_SLOT, SHORTEST_SPLIT, WorkItems
from longseq_bench.patterns.block_layout import BlockLayout

CHUNK = 2**24
"""Scores that exist at the same time, 64 MiB, or those of one row of all heads."""
MAX_TILE = 2048
"""Scores, or lengths of columns, that a program looks at together."""
_LISTS, _ENTRIES, _COLUMNS = 8, 32, 32
"""Tile of a transposition: lists of rows, their entries, and columns that these are compared to."""

_LOWEST = tl.constexpr(-(2**31))
_DIAGONAL = tl.constexpr(2**31 - 1)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@jit
def _load_order(
    scores: tensor, start: tensor, row: tensor, visible: tensor, N: tl.constexpr
) -> tensor:
    """Return N scores as integers of the same order, and whether they are NaN.

    Scores above the largest number are equal to it, -0.0 is 0.0; the diagonal comes before all.
    """
    at = start + tl.arange(0, N)
    score = tl.load(scores + at, mask=at < visible, other=0.0)
    number = tl.where(score == 0, 0.0, tl.minimum(score, _LARGEST)).to(tl.int32, bitcast=True)
    order = tl.where(number < 0, number ^ _DIAGONAL, number)
    order = tl.where(at == row, _DIAGONAL, order)
    return tl.where(at < visible, order, _LOWEST), score != score


@jit
def select(
    scores: tensor, indptr: tensor, indices: tensor, nans: tensor, first: tensor, rows: tensor,
    heads: tensor, kept: tensor, CAUSAL: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Write the kept blocks of one row of one head, ascending, and its first NaN, or `rows`.

    scores: (heads, rows of this chunk, rows) from row `first` on.  kept: blocks of a head.
    """
    program = tl.program_id(0)
    of_chunk = tl.num_programs(0) // heads
    head, row = (program // of_chunk).to(tl.int64), first + program % of_chunk
    scores += program.to(tl.int64) * rows
    visible = row + 1 if CAUSAL else rows
    place = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - place).to(tl.int32)
    # bit by bit the largest number that `count` scores reach, and how many are above it
    least, above = tl.full([], _LOWEST, tl.int32), tl.full([], 0, tl.int32)
    for bit in range(32):
        higher = least ^ (tl.full([], 1, tl.int32) << (31 - bit))
        reach = tl.full([], 0, tl.int32)
        for start in range(0, visible, N):
            order, _ = _load_order(scores, start, row, visible, N)
            reach += tl.sum((order >= higher).to(tl.int32), 0)
        above = tl.where(reach >= count, above, reach)
        least = tl.where(reach >= count, higher, least)
    room, nan = count - above, rows
    indices += head * kept + place
    for start in range(0, visible, N):
        order, is_nan = _load_order(scores, start, row, visible, N)
        block, equal = start + tl.arange(0, N), (order == least).to(tl.int32)
        keep = (order > least) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        tl.store(indices + tl.cumsum(keep.to(tl.int32), 0) - 1, block, mask=keep)
        indices += tl.sum(keep.to(tl.int32), 0)
        room -= tl.sum(equal, 0)
        nan = tl.minimum(nan, tl.min(tl.where(is_nan, block, rows), 0))
    tl.store(nans + head * rows + row, nan)


@jit
def transpose(
    indices: tensor, indptr: tensor, lengths: tensor, columns: tensor, rows: tensor, kept: tensor,
    GROUP: tl.constexpr, FILL: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Count the entries of C columns of one KV head or, with FILL, write them to `columns`.

    Entries are head of the group * rows + row, in the order of rows, then of heads.
    """
    programs = tl.cdiv(rows, C)
    head = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * C
    column, lengths = first + tl.arange(0, C), lengths + head * rows
    indices += head * GROUP * kept
    found = tl.zeros([C], tl.int64)
    if FILL:
        found += head * GROUP * kept
        for start in range(0, first, C):
            found += tl.sum(tl.load(lengths + start + tl.arange(0, C)).to(tl.int64), 0)
        own = tl.load(lengths + column, mask=column < rows, other=0).to(tl.int64)
        found += tl.cumsum(own, 0) - own
    for start in range(0, rows * GROUP, M):
        row = (start + tl.arange(0, M)) // GROUP
        member = (start + tl.arange(0, M)).to(tl.int64) % GROUP
        begin = tl.load(indptr + row, mask=row < rows, other=0)
        count = (tl.load(indptr + row + 1, mask=row < rows, other=0) - begin).to(tl.int32)
        hit = tl.zeros([M, C], tl.int32)
        for at in range(0, tl.max(count, 0), N):
            entry = at + tl.arange(0, N)
            to = (member * kept + begin)[:, None] + entry[None, :]
            block = tl.load(indices + to, mask=entry[None, :] < count[:, None], other=-1)
            hit += tl.max((block[:, :, None] == column[None, None, :]).to(tl.int32), 1)
        if FILL:
            to = found[None, :] + tl.cumsum(hit, 0) - 1
            codes = (member * rows + row).to(tl.int32)[:, None] + tl.zeros([M, C], tl.int32)
            tl.store(columns + to, codes, mask=hit > 0)
        found += tl.sum(hit, 0)
    if not FILL:
        tl.store(lengths + column, found.to(tl.int32), mask=column < rows)


@jit
def divide(
    lengths: tensor, places: tensor, bounds: tensor, splits: tensor, limit: tensor, slots: tensor,
    rows: tensor, items: tensor, kept: tensor, FIRST: tl.constexpr, LAST: tl.constexpr,
    N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Write the items of one column; see WorkItems.

    limit: the least length from which columns are split, doubled until there are enough slots.
    FIRST, LAST: entries at the ends of a column that are computed with a mask.
    """
    column = tl.program_id(0) % rows
    head = (tl.program_id(0) // rows).to(tl.int64)
    lengths += head * rows
    none = tl.full([], 0, tl.int32)
    used, split_columns, begin, slot, split = slots + 1, none, head * kept, none, none
    while used > slots:
        used, split_columns, begin, slot, split = none, none, head * kept, none, none
        for start in range(0, rows, N):
            other = start + tl.arange(0, N)
            length = tl.load(lengths + other, mask=other < rows, other=0)
            is_split, before = (length > limit).to(tl.int32), (other < column).to(tl.int32)
            parts = tl.cdiv(length, limit) * is_split
            used += tl.sum(parts, 0)
            split_columns += tl.sum(is_split, 0)
            begin += tl.sum((length * before).to(tl.int64), 0)
            slot += tl.sum(parts * before, 0)
            split += tl.sum(is_split * before, 0)
        limit = limit * 2
    own = tl.load(lengths + column).to(tl.int64)
    in_parts = tl.cdiv(own, limit // 2)
    at, stop = slot, slot + in_parts.to(tl.int32)
    if in_parts > 1:
        to = splits + 3 * (head * (slots // 2) + split)
        tl.store(to, column)
        tl.store(to + 1, slot)
        tl.store(to + 2, in_parts.to(tl.int32))
    else:
        at = used + column - split
        stop = at + 1
        if at == used + rows - split_columns - 1:
            # the last one is repeated where other heads may have an item; so no slot is left open
            stop = items
            for empty in range(split_columns, slots // 2):
                tl.store(splits + 3 * (head * (slots // 2) + empty) + 2, 0)
    for item in range(at, stop):
        part = (item - at) % in_parts
        low, high = own * part // in_parts, own * (part + 1) // in_parts
        start = tl.minimum(tl.maximum(low, FIRST), high)
        to = head * items + item
        tl.store(places + 2 * to, column)
        tl.store(places + 2 * to + 1, tl.where(in_parts > 1, item, -1))
        tl.store(bounds + 4 * to, begin + low)
        tl.store(bounds + 4 * to + 1, begin + start)
        tl.store(bounds + 4 * to + 2, begin + tl.maximum(start, tl.minimum(high, own - LAST)))
        tl.store(bounds + 4 * to + 3, begin + high)


class TopBlocks(TritonBlocks):
    """Blocks with the highest scores; `choose` returns those of a call.

    places: a layout with the places of each row's list, and no indices. `heads` query heads have
    one layout each.
    """

    def __init__(self, places: BlockLayout, heads: int) -> None:
        super().__init__([places] * heads)
        self._indptr: dict[torch.device, Tensor] = {}
        self.indices = self.nans = torch.empty(0, dtype=torch.int32)

    def choose(self, queries: Tensor, keys: Tensor) -> TopBlocks:
        """Choose by the product of queries (Hq, rows, C) and keys (Hk, rows, C), float32."""
        (heads, rows, _), device, own = queries.shape, queries.device, copy.copy(self)
        self.rows(device)
        kept, own._columns = int(self.layouts[0].indptr[-1]), {}
        own.indices, own.nans = (
            torch.empty(heads, size, dtype=torch.int32, device=device) for size in (kept, rows)
        )
        constants = {"CAUSAL": self.causal, "N": _tile(rows)}
        step = min(rows, max(1, CHUNK // (heads * rows)))
        for first in range(0, rows, step):
            part = queries[:, first : first + step]
            scores = part.reshape(len(keys), -1, keys.shape[2]) @ keys.mT
            sizes = first, rows, heads, kept
            launch = Launch(select, heads * part.shape[1], sizes, constants)
            with on_device(queries):
                launch(scores, self._indptr[device], own.indices, own.nans)
        return own

    def to_host(self) -> tuple[BlockLayout, ...]:
        """Return the layouts of all heads. Raises UserError for a score that is NaN."""
        nans = self.nans.cpu().numpy()
        for head, row in np.argwhere(nans < nans.shape[1]):
            raise nan_error(row, nans[head, row])
        return tuple(replace(self.layouts[0], indices=own) for own in self.indices.cpu().numpy())

    @override
    def rows(self, device: torch.device) -> WorkItems:
        if device not in self._rows:
            layout, heads = self.layouts[0], len(self.layouts)
            order = np.argsort(-layout.row_lengths, kind="stable")
            begin, end = layout.indptr[:-1][order], layout.indptr[1:][order]
            # the causal diagonal and the short last block can only be the last of a row
            has_mask = self.causal or self.seq_len % self.block != 0
            bounds = np.stack([begin, begin, end - has_mask, end], 1)
            bounds = bounds + layout.indptr[-1] * np.arange(heads)[:, None, None]
            places = np.tile(np.stack([order, order * 0 - 1], 1), (heads, 1, 1))
            arrays = (
                places.astype(np.int32),
                bounds,
                np.zeros((heads, 0, 3), np.int32),
                layout.indptr,
            )
            own = [torch.from_numpy(array).to(device) for array in arrays]
            self._rows[device] = WorkItems(own[0], own[1], self.indices, own[2], 0)
            self._indptr[device] = own[3]
        return replace(self._rows[device], indices=self.indices)

    @override
    def columns(self, device: torch.device, group: int) -> WorkItems:
        if (device, group) in self._columns:
            return self._columns[device, group]
        rows, kv_heads = self.layouts[0].rows, len(self.layouts) // group
        kept, slots = self.indices.shape[1], rows // ROWS_PER_SLOT
        slots = slots if slots > 1 else 0
        limit = max(SHORTEST_SPLIT, MEANS * kept * group // rows) if slots else rows * group
        items = rows + slots

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(kv_heads, *shape, dtype=dtype, device=device)

        lengths, columns, places = empty(rows), empty(kept * group), empty(items, 2)
        bounds, splits = empty(items, 4, dtype=torch.int64), empty(slots // 2, 3)
        tile = {"C": _COLUMNS, "M": _LISTS, "N": _ENTRIES, "GROUP": group}
        programs = kv_heads * -(-rows // _COLUMNS)
        count, fill = (
            Launch(transpose, programs, (rows, kept), tile | {"FILL": f}) for f in (False, True)
        )
        ends = {"FIRST": group * self.causal, "LAST": group * (self.seq_len % self.block != 0)}
        sizes = limit, slots, rows, items, kept * group
        parts = Launch(divide, kv_heads * rows, sizes, {**ends, "N": _tile(rows)})
        lists = self.indices, self._indptr[device], lengths, columns
        with on_device(self.indices):
            count(*lists)
            parts(lengths, places, bounds, splits)
            fill(*lists)
        made = WorkItems(places, bounds, columns.flatten(), splits, slots)
        self._columns[device, group] = made
        return made


def _tile(rows: int) -> int:
    return min(MAX_TILE, int(triton.next_power_of_2(rows)))
