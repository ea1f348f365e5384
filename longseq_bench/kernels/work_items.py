"""Work items of the Triton kernels: the lists of a block layout in parts of similar length.

A row of global tokens, or the column of a sink, is as long as the sequence. One program would still
work on it when all others have finished. So a list longer than a multiple of the mean becomes
several items; each writes its partial result to a slot, and triton_merge.py joins the slots.

Lists that are on a device are divided there, and nothing waits for it.
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
    blocks from start to stop need no mask. A layout with fewer items than others repeats one.
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

    def to(self, device: torch.device) -> WorkItems:
        """Return a copy on a device."""
        places, bounds, indices = (t.to(device) for t in (self.places, self.bounds, self.indices))
        return WorkItems(places, bounds, indices, self.splits.to(device), self.slots)

    @classmethod
    def of_rows(cls, layouts: Sequence[BlockLayout], device: torch.device) -> WorkItems:
        """Return items of each layout's rows: key blocks that a query block sees."""
        indices, lengths = _lists_of(layouts)
        return cls.of_lists(indices, lengths, row_masks(layouts[0])).to(device)

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
        lists = indices, lengths, *row_keys(len(layouts), layouts[0].rows, group)
        return cls.transposed(lists, layouts[0]).to(device)

    @classmethod
    def transposed(
        cls, lists: tuple[Tensor, ...], layout: BlockLayout, exact: bool = True
    ) -> WorkItems:
        """Return items of the columns of rows on any device; see of_lists.

        lists: indices, lengths, and row_keys.  layout: one of the layouts.
        """
        (indices, lengths, of_rows, edges), rows = lists, layout.rows
        group = len(of_rows) // (len(edges) - 1)
        width = rows * group
        own = torch.repeat_interleave(of_rows, lengths.flatten(), output_size=len(indices))
        order = torch.add(own, indices, alpha=width).sort().values
        of_columns = torch.searchsorted(order, edges).diff().view(-1, rows)
        masked = group * layout.causal, group * (layout.seq_len % layout.block != 0)
        return cls.of_lists((order % width).to(torch.int32), of_columns, masked, exact)

    @classmethod
    def of_lists(
        cls, indices: Tensor, lengths: Tensor, masked: tuple[int, int], exact: bool = True
    ) -> WorkItems:
        """Split lists, and sort their items, the longest first.

        lengths (layouts, rows) int64: of lists that follow each other in `indices`.
        masked: entries at the start and at the end of each list that may need a mask.
        exact: with no more slots than these lists need, which waits for the device.
        """
        rows, device = lengths.shape[1], lengths.device
        first = max(SHORTEST_SPLIT, MEANS * len(indices) // lengths.numel())
        limits = first * 2 ** torch.arange(LIMITS, device=device)
        long, slots = lengths[..., None], max(rows // ROWS_PER_SLOT, 2)
        needed = (long + (limits - 1)) // limits * (long > limits)
        choice = (needed.sum(1) > slots).sum(1).clamp(max=LIMITS - 1)
        of_split = needed.take_along_dim(choice[:, None, None], 2)[..., 0]
        parts = of_split.clamp(min=1)
        ends, slot_ends = parts.cumsum(1), of_split.cumsum(1)
        count = rows + slots
        if exact:
            slots, count = int(slot_ends[:, -1].max()), int(ends[:, -1].max())
        item = torch.arange(count, device=device).expand(len(lengths), -1).contiguous()
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
        return cls(places.to(torch.int32), bounds, indices, splits.to(torch.int32), slots)


def _lists_of(layouts: Sequence[BlockLayout]) -> tuple[Tensor, Tensor]:
    """Return the indices of all layouts, and the lengths of their rows, (layouts, rows)."""
    indices = np.concatenate([layout.indices for layout in layouts])
    lengths = np.stack([layout.row_lengths for layout in layouts])
    return torch.from_numpy(indices), torch.from_numpy(lengths)


def row_keys(layouts: int, rows: int, group: int) -> tuple[Tensor, Tensor]:
    """Return a number of each row, layout after layout, and one of each column, and the end.

    Index * rows * group is added to that of its row; sorted, these numbers list the columns.
    """
    dtype = torch.int32 if layouts * rows * rows < 2**31 else torch.int64
    head, row, width = torch.arange(layouts)[:, None], torch.arange(rows), rows * group
    numbers = head // group * rows * width + row * group + head % group
    edges = torch.arange(layouts // group * rows + 1) * width
    return numbers.flatten().to(dtype), edges.to(dtype)


def row_masks(layout: BlockLayout) -> tuple[int, int]:
    """Return how many blocks at both ends of a row may need a mask: the diagonal, a short one."""
    return 0, int(layout.causal or layout.seq_len % layout.block != 0)
