"""Work items of the Triton kernels: the lists of a block layout in parts of similar length.

A row of global tokens, or the column of a sink, is as long as the sequence. One program would still
work on it when all others have finished. So a list longer than a multiple of the mean becomes
several items; each writes its partial result to a slot, and triton_merge.py joins the slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout

List = tuple[Ints, NDArray[np.int32]]
Lists = Sequence[List]
"""indptr and indices of the compressed rows (or columns) of each layout."""

SHORTEST_SPLIT = 64
"""Blocks: no shorter list is split."""

MEANS = 4
"""A list is split if it is longer than this many times the mean."""

ROWS_PER_SLOT = 32
"""A split needs a float32 slot per item: at most one per so many rows, 1/16 of a 16-bit tensor."""


@dataclass(frozen=True)
class WorkItems:
    """Work items and lists on a device, layout after layout.

    places (layouts, items, 2) int32: block of each item, and its slot, or -1.
    bounds (layouts, items, 4) int64: begin, start, stop and end of its list in `indices`; the
    blocks from start to stop need no mask. A layout with fewer items than others repeats its last.
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
    def of_rows(cls, layouts: Sequence[BlockLayout], device: torch.device) -> "WorkItems":
        """Return items of each layout's rows: key blocks that a query block sees."""
        lists = [(layout.indptr, layout.indices) for layout in layouts]
        return cls._build(lists, layouts[0], False, device)

    @classmethod
    def of_columns(
        cls, layouts: Sequence[BlockLayout], group: int, device: torch.device
    ) -> "WorkItems":
        """Return items of columns: query blocks that see a key block.

        group: query heads per KV head. One layout per query head becomes one list per KV head,
        which has `head * rows + block`, in the order of blocks.
        """
        lists = [layout.transpose() for layout in layouts]
        if len(lists) > 1:
            lists = [_joint(lists[i : i + group]) for i in range(0, len(lists), group)]
        return cls._build(lists, layouts[0], True, device)

    @classmethod
    def _build(
        cls, lists: Lists, layout: BlockLayout, are_columns: bool, device: torch.device
    ) -> "WorkItems":
        """Split and sort the lists, the longest first."""
        limit = _longest_item(np.stack([np.diff(indptr) for indptr, _ in lists]))
        parts, offset = [], 0
        for indptr, indices in lists:
            masked = _masked_counts(indptr, indices, layout, are_columns)
            place, bound, split = _items_of_layout(indptr, limit, masked)
            parts.append((place, bound + offset, split))
            offset += len(indices)
        places, bounds, splits = map(_stacked, zip(*parts, strict=True))
        indices = np.concatenate([indices for _, indices in lists])
        slots = int(places[..., 1].max()) + 1
        arrays = (places.astype(np.int32), bounds, indices, splits.astype(np.int32))
        own = [torch.from_numpy(array).to(device) for array in arrays]
        return cls(own[0], own[1], own[2], own[3], slots)


def _joint(lists: Lists) -> List:
    """Return the lists of some heads' columns as one, `head * rows + block`, sorted by block."""
    rows = len(lists[0][0]) - 1
    own = [np.repeat(np.arange(rows), np.diff(indptr)) for indptr, _ in lists]
    codes = [indices + np.int64(head) * rows for head, (_, indices) in enumerate(lists)]
    column, code = np.concatenate(own), np.concatenate(codes)
    order = np.lexsort((code % rows, column))
    indptr = np.sum([indptr for indptr, _ in lists], axis=0)
    return indptr, code[order].astype(np.int32)


def _masked_counts(
    indptr: Ints, indices: NDArray[np.int32], layout: BlockLayout, are_columns: bool
) -> tuple[Ints, Ints]:
    """Return how many of the first e list entries need a mask, for each e.

    The first array counts those at the start of their list, the second those at its end. They are
    the causal diagonal, and the short last block.
    """
    blocks = indices % layout.rows
    diagonal = blocks == np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    diagonal &= layout.causal
    short = (blocks == layout.rows - 1) & (layout.seq_len % layout.block != 0) & ~diagonal
    none = np.zeros_like(short)
    ends = (diagonal, short) if are_columns else (none, diagonal | short)
    first, last = (np.concatenate(([0], np.cumsum(end))) for end in ends)
    return first, last


def _longest_item(lengths: Ints) -> int:
    """Return the length from which lists are split; lengths (layouts, rows)."""
    limit = max(SHORTEST_SPLIT, int(MEANS * lengths.mean()))
    while (_slots(lengths, limit) > max(lengths.shape[1] // ROWS_PER_SLOT, 2)).any():
        limit *= 2
    return limit


def _slots(lengths: Ints, limit: int) -> Ints:
    items = -(-lengths // limit)
    slots: Ints = np.where(items > 1, items, 0).sum(-1)
    return slots


def _items_of_layout(
    indptr: Ints, limit: int, masked: tuple[Ints, Ints]
) -> tuple[Ints, Ints, Ints]:
    """Return places, bounds and splits of one layout; see WorkItems."""
    lengths = np.diff(indptr)
    parts = np.maximum(-(-lengths // limit), 1)
    block = np.repeat(np.arange(len(lengths)), parts)
    first_item = np.cumsum(parts) - parts
    part = np.arange(len(block)) - first_item[block]
    begin = indptr[block] + lengths[block] * part // parts[block]
    end = indptr[block] + lengths[block] * (part + 1) // parts[block]
    start, stop = begin + masked[0][end] - masked[0][begin], end - masked[1][end] + masked[1][begin]

    is_split = parts > 1
    first_slot = np.cumsum(np.where(is_split, parts, 0)) - np.where(is_split, parts, 0)
    slot = np.where(is_split[block], first_slot[block] + part, -1)
    # a stable sort keeps equal items in sequence, so that neighbouring programs share keys
    order = np.argsort(begin - end, kind="stable")
    split = np.flatnonzero(is_split)
    return (
        np.stack([block, slot], axis=1)[order],
        np.stack([begin, start, stop, end], axis=1)[order],
        np.stack([split, first_slot[split], parts[split]], axis=1),
    )


def _stacked(arrays: Sequence[Ints]) -> Ints:
    """Stack arrays of different lengths, the shorter ones filled with their last row.

    So the last and shortest item is computed again, with the same result. Rows of arrays without
    any are zeros: splits without slots.
    """
    longest = max(len(array) for array in arrays)
    joint = np.zeros((len(arrays), longest, arrays[0].shape[1]), dtype=np.int64)
    for own, array in zip(joint, arrays, strict=True):
        own[: len(array)] = array
        if len(array):
            own[len(array) :] = array[-1]
    return joint
