"""Work items of the Triton kernels: the lists of a block layout in parts of similar length.

A row of global tokens, or the column of a sink, is as long as the sequence. One program would still
work on it when all others have finished. So a list longer than a multiple of the mean becomes
several items; each writes its partial result to a slot, and triton_merge.py joins the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longseq_bench.patterns.block_layout import BlockLayout

SHORTEST_SPLIT = 64
"""Blocks: no shorter list is split."""

MEANS = 4
"""A list is split if it is longer than this many times the mean; where that takes too many slots,
than twice as many, and so on, up to 2^(LIMITS - 1), which never takes too many."""
LIMITS = 5

ROWS_PER_SLOT = 32
"""A split needs a float32 slot per item: at most one per so many rows, 1/16 of a 16-bit tensor."""


@dataclass(frozen=True)
class WorkItems:
    """Work items and lists on a device, layout after layout.

    places (layouts, items, 2) int32: block of each item, and its slot, or -1.
    bounds (layouts, items, 4) int64: begin, start, stop and end of its list in `indices`; the
    blocks from start to stop need no mask. A layout with fewer items than others repeats one, or
    has empty ones.
    indices int32: the lists.
    splits (layouts, split rows, 3) int32: block, first slot and number of slots of each split row;
    no slots in a layout without any.  slots: of each layout.
    """

    places: Tensor
    bounds: Tensor
    indices: Tensor
    splits: Tensor
    slots: int

    @property
    def count(self) -> int:
        """Number of items of a layout."""
        return self.places.shape[1]

    @classmethod
    def of_rows(cls, layouts: Sequence[BlockLayout], device: torch.device) -> WorkItems:
        """Return items of each layout's rows: key blocks that a query block sees."""
        indices, lengths = _lists_of(layouts)
        one = layouts[0]
        # the last block of a row: that of the diagonal, or a short one
        last = int(one.causal or one.seq_len % one.block != 0)
        return cls.of_lists(indices, lengths, (0, last), device)

    @classmethod
    def of_columns(
        cls, layouts: Sequence[BlockLayout], group: int, device: torch.device
    ) -> WorkItems:
        """Return items of columns: query blocks that see a key block.

        group: query heads per KV head. One layout per query head becomes one list per KV head,
        which has `block * group + head`, ascending.
        """
        indices, lengths = _lists_of(layouts)
        group = group if len(layouts) > 1 else 1
        rows, heads = layouts[0].rows, torch.arange(len(layouts))[:, None]
        width = rows * group
        # of each entry its column in the lists of all KV heads, times width, and what a list has
        entries = heads // group * rows * width + torch.arange(rows) * group + heads % group
        entries = entries.to(torch.int32 if entries.max() + rows * width < 2**31 else torch.int64)
        entries = entries.flatten().repeat_interleave(lengths.flatten())
        order = entries.add(indices, alpha=width).sort().values
        of_columns = (order // width).bincount(minlength=len(layouts) // group * rows)
        lists = (order % width).to(torch.int32), of_columns.view(-1, rows)
        return cls.of_lists(*lists, column_masks(layouts[0], group), device)

    @classmethod
    def of_lists(
        cls, indices: Tensor, lengths: Tensor, masked: tuple[int, int], device: torch.device
    ) -> WorkItems:
        """Split lists, sort their items, the longest first, and copy all to a device.

        lengths (layouts, rows) int64: of lists that follow each other in `indices`.
        masked: entries at the start and at the end of each list that may need a mask.
        """
        rows = lengths.shape[1]
        first = max(SHORTEST_SPLIT, MEANS * int(lengths.sum()) // lengths.numel())
        limits = first * 2 ** torch.arange(LIMITS)
        long, most = lengths[..., None], max(rows // ROWS_PER_SLOT, 2)
        needed = (long + (limits - 1)) // limits * (long > limits)
        choice = (needed.sum(1) > most).sum(1).clamp(max=LIMITS - 1)
        of_split = needed.take_along_dim(choice[:, None, None], 2)[..., 0]
        parts = of_split.clamp(min=1)
        ends, slot_ends = parts.cumsum(1), of_split.cumsum(1)
        slots, count = int(slot_ends[:, -1].max()), int(ends[:, -1].max())
        item = torch.arange(count).expand(len(lengths), -1).contiguous()
        row = torch.searchsorted(ends, item, right=True).clamp(max=rows - 1)
        offsets = lengths.flatten().cumsum(0).view_as(lengths) - lengths
        of_row = torch.stack([lengths, parts, ends - parts, slot_ends - of_split, offsets], 2)
        found = of_row.take_along_dim(row[..., None], 1)
        own, of_own, first_item, first_slot, offset = found.unbind(2)
        part = torch.minimum(item - first_item, of_own - 1)
        low, high = own * part // of_own, own * (part + 1) // of_own
        start = torch.minimum(low.clamp(min=masked[0]), high)
        stop = torch.maximum(torch.minimum(high, own - masked[1]), start)
        bounds = torch.stack([low, start, stop, high], 2) + offset[..., None]
        places = torch.stack([row, (first_slot + part).where(of_own > 1, -1)], 2)
        # a stable sort keeps equal items in sequence, so that neighbouring programs share keys
        order = (low - high).argsort(dim=1, stable=True)[..., None]
        split = of_split.argsort(dim=1, stable=True, descending=True)[:, : slots // 2, None]
        of_splits = of_row[..., 3:4], of_split[..., None]
        splits = torch.cat([split, *(t.take_along_dim(split, 1) for t in of_splits)], 2)
        places, bounds = places.take_along_dim(order, 1), bounds.take_along_dim(order, 1)
        places, splits = (t.to(device, torch.int32) for t in (places, splits))
        return cls(places, bounds.to(device), indices.to(device), splits, slots)


def _lists_of(layouts: Sequence[BlockLayout]) -> tuple[Tensor, Tensor]:
    """Return the indices of all layouts, and the lengths of their rows, (layouts, rows)."""
    indices = np.concatenate([layout.indices for layout in layouts])
    lengths = np.stack([layout.row_lengths for layout in layouts])
    return torch.from_numpy(indices), torch.from_numpy(lengths)


def column_masks(layout: BlockLayout, group: int) -> tuple[int, int]:
    """Return how many entries at both ends of a column, of `group` heads, may need a mask."""
    return group * layout.causal, group * (layout.seq_len % layout.block != 0)
