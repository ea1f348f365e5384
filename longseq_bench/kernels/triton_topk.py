"""Block-sparse attention on CUDA to the blocks with the highest scores, chosen there, in Triton.

No score and no list comes to the host, and nothing waits for the device: each row keeps a number of
blocks that its length determines, so that the places of all lists of rows are known before.

The choice is that of attention/sparse/topk.py: the diagonal first, then by score; of equal scores
the first. But a NaN is a score like others, since nothing looks at them; the output has it too.
Needs triton: import it where it is used.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor
from typing_extensions import override

from longseq_bench.kernels.triton_blocks import TritonBlocks
from longseq_bench.kernels.triton_kernels import jit
from longseq_bench.kernels.triton_tiles import Launch, on_device
from longseq_bench.kernels.work_items import WorkItems, row_keys, row_masks
from longseq_bench.patterns.block_layout import BlockLayout

CHUNK = 2**24
"""Scores that exist at the same time, 64 MiB, or those of one row of all heads."""
MAX_TILE = 2048
"""Scores that a program looks at together."""

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


class TopBlocks(TritonBlocks):
    """Blocks with the highest scores; `choose` returns those of a call.

    places: a layout with the places of each row's list, and no indices. `heads` query heads have
    one layout each.
    """

    indices: Tensor  # (heads, kept blocks)
    _lists: tuple[Tensor, ...]

    def __init__(self, places: BlockLayout, heads: int) -> None:
        super().__init__([places] * heads)
        self._fixed: dict[tuple[torch.device, int], tuple[WorkItems, list[Tensor]]] = {}

    def choose(self, queries: Tensor, keys: Tensor) -> TopBlocks:
        """Choose by the product of queries (Hq, rows, C) and keys (Hk, rows, C), float32."""
        (heads, rows, _), device, own = queries.shape, queries.device, copy.copy(self)
        kept = int(self.layouts[0].indptr[-1])
        items, (indptr, *lists) = self._prepared(device, heads // len(keys))
        own.indices = torch.empty(heads, kept, dtype=torch.int32, device=device)
        own._lists, own._columns = (own.indices.flatten(), *lists), {}
        own._rows = {device: replace(items, indices=own.indices)}
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
                self._launches[key](scores, indptr, own.indices)
        return own

    def _prepared(self, device: torch.device, group: int) -> tuple[WorkItems, list[Tensor]]:
        """Return what all choices share: items of rows, places and lengths of lists, row_keys."""
        if (device, group) not in self._fixed:
            layout, heads = self.layouts[0], len(self.layouts)
            lengths = torch.from_numpy(layout.row_lengths).expand(heads, -1)
            empty = torch.empty(1, dtype=torch.int32)
            every = empty.expand(int(lengths.sum()))
            items = WorkItems.of_lists(every, lengths, row_masks(layout))
            lists = torch.from_numpy(layout.indptr), lengths, *row_keys(heads, layout.rows, group)
            moved = replace(items, indices=empty).to(device), [t.to(device) for t in lists]
            self._fixed[device, group] = moved
        return self._fixed[device, group]

    @override
    def columns(self, device: torch.device, group: int) -> WorkItems:
        if not self._columns:
            layout = self.layouts[0]
            made = WorkItems.transposed(self._lists, layout, exact=False)
            self._columns = {(device, group): made}
        return self._columns[device, group]

    def to_host(self) -> tuple[BlockLayout, ...]:
        """Return the layouts of all heads."""
        return tuple(replace(self.layouts[0], indices=own) for own in self.indices.cpu().numpy())
