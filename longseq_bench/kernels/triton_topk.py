"""Block-sparse attention on CUDA to the blocks with the highest scores, chosen there, in Triton.

No score and no list comes to the host, and nothing waits for the device: each row keeps a number of
blocks that its length determines, so that the places of all lists of rows are known before. The
lists of columns follow each other, so the place of one is the number of blocks before it in all
rows, which a search finds.

The choice is that of `top_layout`: the diagonal first, then by score; of equal scores the first.
But a NaN is a score like others, since nothing looks at them; the output has it too.
Needs triton: import it where it is used.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor
from typing_extensions import override

from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels.triton_blocks import TritonBlocks
from longseq_bench.kernels.triton_kernels import jit
from longseq_bench.kernels.triton_tiles import Launch, on_device
from longseq_bench.kernels.work_items import SHORTEST_SPLIT, WorkItems, column_masks
from longseq_bench.patterns.block_layout import BlockLayout

CHUNK = 2**24
"""Scores that exist at the same time, 64 MiB, or those of one row of all heads."""
MAX_TILE = 2048
"""Scores, or lists of rows, that a program looks at together."""
SLOTS = 4
"""Slots for parts of columns, divided by the square root of the rows: 128 for 1,024 rows."""

_LOWEST = tl.constexpr(-(2**31))
_DIAGONAL = tl.constexpr(2**31 - 1)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@jit
def _load_order(
    scores: tensor, start: tensor, row: tensor, visible: tensor, N: tl.constexpr
) -> tensor:
    """Return N scores as integers of the same order.

    Scores above the largest number are equal to it, -0.0 is 0.0; the diagonal comes before all.
    """
    at = start + tl.arange(0, N)
    score = tl.load(scores + at, mask=at < visible, other=0.0)
    number = tl.where(score == 0, 0.0, tl.minimum(score, _LARGEST)).to(tl.int32, bitcast=True)
    order = tl.where(number < 0, number ^ _DIAGONAL, number)
    order = tl.where(at == row, _DIAGONAL, order)
    return tl.where(at < visible, order, _LOWEST)


@jit
def select(
    scores: tensor, indptr: tensor, indices: tensor, sizes: tl.tuple, N: tl.constexpr
) -> tensor:
    """Write the kept blocks of one row of one head, ascending.

    scores: (heads, rows of this chunk, rows).
    sizes: the first row of the chunk, rows, heads, kept blocks of a head, and 1 if causal, else 0.
    """
    first, rows, heads, kept, causal = sizes
    program = tl.program_id(0)
    of_chunk = tl.num_programs(0) // heads
    head, row = (program // of_chunk).to(tl.int64), first + program % of_chunk
    scores += program.to(tl.int64) * rows
    visible = rows - (rows - 1 - row) * causal
    place = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - place).to(tl.int32)
    # bit by bit the largest number that `count` scores reach, and how many are above it
    least, above = tl.full([], _LOWEST, tl.int32), tl.full([], 0, tl.int32)
    for bit in range(32):
        higher = least ^ (tl.full([], 1, tl.int32) << (31 - bit))
        reach = tl.full([], 0, tl.int32)
        for start in range(0, visible, N):
            order = _load_order(scores, start, row, visible, N)
            reach += tl.sum((order >= higher).to(tl.int32), 0)
        above = tl.where(reach >= count, above, reach)
        least = tl.where(reach >= count, higher, least)
    room = count - above
    indices += head * kept + place
    for start in range(0, visible, N):
        order = _load_order(scores, start, row, visible, N)
        block, equal = start + tl.arange(0, N), (order == least).to(tl.int32)
        keep = (order > least) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        tl.store(indices + tl.cumsum(keep.to(tl.int32), 0) - 1, block, mask=keep)
        indices += tl.sum(keep.to(tl.int32), 0)
        room -= tl.sum(equal, 0)


@jit
def transpose(
    indices: tensor, indptr: tensor, columns: tensor, places: tensor, bounds: tensor,
    splits: tensor, sizes: tl.tuple, GROUP: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Write the list of one column of one KV head, ascending, and its items; see work_items.py.

    Lists of a head follow each other, so the place of one is the number of blocks before its column
    in all rows. Slot i belongs to the column with entry i * `length` of the lists. A column with
    several slots is split into as many parts; a single slot is not used, and its item is empty.
    sizes: rows, kept blocks of a query head, turns of a search in a row, `length`, slots of a head,
    and entries at the start and at the end of each list that may need a mask.
    """
    rows, kept, turns, length, slots, at_start, at_end = sizes
    program = tl.program_id(0)
    head, column = (program // rows).to(tl.int64), program % rows
    indices += head * GROUP * kept
    begin, count = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    # the second pass writes the list, whose place the first one finds
    for is_second in range(2):
        count = tl.full([], 0, tl.int64)
        for tile in range(0, rows * GROUP, N):
            number = tile + tl.arange(0, N)
            row = number // GROUP
            first = tl.load(indptr + row, mask=row < rows, other=0)
            size = (tl.load(indptr + row + 1, mask=row < rows, other=0) - first).to(tl.int32)
            blocks = indices + (number % GROUP).to(tl.int64) * kept + first
            low, high = tl.zeros_like(size), size
            for _ in range(turns):
                middle = (low + high) // 2
                is_before = tl.load(blocks + middle, mask=low < high, other=column) < column
                low, high = tl.where(is_before, middle + 1, low), tl.where(is_before, high, middle)
            found = tl.load(blocks + low, mask=low < size, other=-1) == column
            at = columns + head * GROUP * kept + begin + count + tl.cumsum(found.to(tl.int32), 0)
            tl.store(at - 1, number, mask=found & (is_second > 0))
            begin += tl.sum(low, 0) * (1 - is_second)
            count += tl.sum(found.to(tl.int32), 0)
    slot = tl.cdiv(begin, length)
    parts = tl.cdiv(begin + count, length) - slot
    begin += head * GROUP * kept
    # items of slots are the first, because they are long; then one for each whole column
    for part in range(-1, parts):
        in_slot, is_split = part >= 0, parts > 1
        own, of_own = tl.where(in_slot == is_split, count, 0), tl.where(in_slot, parts, 1)
        own_part = tl.maximum(part, 0)
        low, high = own * own_part // of_own, own * (own_part + 1) // of_own
        start = tl.minimum(tl.maximum(low, at_start), high)
        stop = tl.maximum(tl.minimum(high, count - at_end), start)
        item = head * (slots + rows) + tl.where(in_slot, slot + part, slots + column)
        tl.store(places + 2 * item, column)
        tl.store(places + 2 * item + 1, tl.where(in_slot, slot + part, -1))
        tl.store(bounds + 4 * item, begin + low)
        tl.store(bounds + 4 * item + 1, begin + start)
        tl.store(bounds + 4 * item + 2, begin + stop)
        tl.store(bounds + 4 * item + 3, begin + high)
        split = splits + 3 * (head * slots + slot + part)
        tl.store(split, column, mask=in_slot)
        tl.store(split + 1, slot, mask=in_slot)
        tl.store(split + 2, tl.where((part == 0) & is_split, parts, 0), mask=in_slot)


class TopBlocks(TritonBlocks):
    """Blocks with the highest scores; `choose` returns those of a call.

    places: a layout with the places of each row's list, and no indices. `heads` query heads have
    one layout each.
    """

    indices: Tensor  # (heads, kept blocks)

    def __init__(self, places: BlockLayout, heads: int, scores: Scores = PLAIN_SCORES) -> None:
        super().__init__([places] * heads, scores)
        self._places: dict[torch.device, Tensor] = {}

    def choose(self, queries: Tensor, keys: Tensor) -> TopBlocks:
        """Choose by the product of queries (Hq, rows, C) and keys (Hk, rows, C), float32."""
        (heads, rows, _), device, own = queries.shape, queries.device, copy.copy(self)
        kept, items = int(self.layouts[0].indptr[-1]), self.rows(device)
        own.indices = torch.empty(heads, kept, dtype=torch.int32, device=device)
        own._rows = {device: replace(items, indices=own.indices)}
        if device not in self._places:
            self._places[device] = torch.from_numpy(self.layouts[0].indptr).to(device)
        tile = {"N": min(MAX_TILE, int(triton.next_power_of_2(rows)))}
        step = min(rows, max(1, CHUNK // (heads * rows)))
        for first in range(0, rows, step):
            part = queries[:, first : first + step]
            scores = part.reshape(len(keys), -1, keys.shape[2]) @ keys.mT
            key = (device, part.shape, first)
            if key not in self._launches:
                sizes = first, rows, heads, kept, int(self.causal)
                self._launches[key] = Launch(select, heads * part.shape[1], [sizes], tile)
            with on_device(queries):
                self._launches[key](scores, self._places[device], own.indices)
        return own

    @override
    def columns(self, device: torch.device, group: int) -> WorkItems:
        layout, heads = self.layouts[0], len(self.layouts) // group
        rows, kept = layout.rows, self.indices.shape[1]
        length = max(SHORTEST_SPLIT, kept * group // (SLOTS * math.isqrt(rows)))
        slots = -(-kept * group // length)
        key = (device, group)
        if key not in self._launches:
            turns = int(layout.row_lengths.max()).bit_length()
            sizes = rows, kept, turns, length, slots, *column_masks(layout, group)
            tile = {"N": min(MAX_TILE, int(triton.next_power_of_2(rows * group))), "GROUP": group}
            self._launches[key] = Launch(transpose, heads * rows, [sizes], tile)
        new, count = self.indices.new_empty, slots + rows
        places, bounds = new(heads, count, 2), new(heads, count, 4, dtype=torch.int64)
        items = WorkItems(places, bounds, new(self.indices.numel()), new(heads, slots, 3), slots)
        lists = items.indices, places, bounds, items.splits
        with on_device(self.indices):
            self._launches[key](self.indices, self._places[device], *lists)
        return items

    def to_host(self) -> tuple[BlockLayout, ...]:
        """Return the layouts of all heads."""
        return tuple(replace(self.layouts[0], indices=own) for own in self.indices.cpu().numpy())
