"""Block-sparse patterns: the key blocks that each query block keeps.

Every pattern keeps exactly the requested number of blocks per row, the diagonal block included. It
is computed for many rows at once in integers, so it is the same on every machine.

A kernel reads key blocks that neighbouring rows share once: `strided` has the same columns in all
rows, and the levels of `hierarchical` lie on multiples of their strides.

Sources: local-window and global-local, Longformer (arXiv 2004.05150); strided, the fixed pattern of
Sparse Transformer (1904.10509); random, BigBird (2007.14062); sink-window, StreamingLLM
(2309.17453); dilated-sparse takes LongNet's growing strides (2307.02486) between blocks; indices,
lists of each KV head as a learned indexer gives them, NSA (2502.11089), DeepSeek-V3.2 (2512.02556).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UnknownNameError, UnsupportedError, UserError
from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout, visible_blocks
from longseq_bench.patterns.visible_keys import VisibleKeys

CHUNK = 2**16
"""Table cells per chunk: few enough for the cache."""

WITH_SPECIAL = ("global-local", "sink-window")
"""Patterns with global or sink blocks."""

WITH_WINDOW = ("global-local", "local-window", "sink-window", "strided")
"""Patterns with a window that can be set in tokens."""

OF_RUNS = ("global-local", "local-window", "sink-window")
"""Patterns whose rows are at most two runs of blocks, from first_query on."""

BY_KV_HEAD = "indices"
"""The pattern of which every KV head has a layout of its own."""

_FRACTION = 32
"""Fractional bits of a fixed-point logarithm."""


@dataclass(frozen=True)
class LayoutRows:
    """Rows of a layout, the columns (rows, 1) of a table of the blocks they keep.

    row: index of the row, counted from the first block that it may see.  visible: blocks it may see
    (row + 1 if causal, else all, or those that a mask shows).  kept: blocks it keeps.
    slot: (1, widest), the columns 0 ... widest - 1 of the table.
    special: global or sink blocks.  stride, window: stride and minimum window of `strided`.
    """

    row: Ints
    visible: Ints
    kept: Ints
    slot: Ints
    seed: int
    special: int
    stride: int
    window: int


Pattern = Callable[[LayoutRows], Ints]
"""Returns key blocks (rows, widest), ascending; entries at slot >= kept are ignored."""

Side = Callable[[Ints, Ints, Ints, Ints], Ints]
"""side(row, nth, count, room): of `count` blocks before a row, at most `room` away, the nth nearest
(the nearest is 0)."""


def check_sparsity(sparsity: float) -> None:
    """Raise UserError for a sparsity outside [0, 1) or NaN."""
    if not 0 <= sparsity < 1:
        hint = "0.99 keeps one block in a hundred"
        raise UserError(f"sparsity {sparsity:g} is outside [0, 1); {hint}")


def check_options(
    pattern: str, seq_len: int, block: int, sparsity: float, special: int, window: int | None
) -> None:
    """Raise an error for arguments of `make_layout` that name no layout.

    UnknownNameError: the pattern.  UnsupportedError: more special tokens than tokens.  UserError:
    the sparsity, and special tokens or a window that the pattern can't have.
    """
    if pattern not in PATTERNS:
        raise UnknownNameError("pattern", pattern, PATTERNS)
    check_sparsity(sparsity)
    if special and pattern not in WITH_SPECIAL:
        raise UserError(
            f"globals={special} is not supported by pattern={pattern}; "
            f"use {' or '.join(WITH_SPECIAL)}"
        )
    if special > seq_len:
        raise UnsupportedError(
            f"globals={special} is more than the {seq_len} tokens of the sequence"
        )
    if window is not None and pattern not in WITH_WINDOW:
        raise UserError(
            f"window is not supported by pattern={pattern}; "
            f"use {', '.join(WITH_WINDOW[:-1])} or {WITH_WINDOW[-1]}"
        )
    if window is not None and window < block:
        raise UserError(
            f"a window of {window} tokens is smaller than a block; the minimum is {block}"
        )


def kept_counts(visible: Ints, sparsity: float) -> Ints:
    """Return the blocks per row, (rows,): (1 - sparsity) of the visible, rounded, at least 1."""
    counts: Ints = np.clip(np.rint((1 - sparsity) * visible).astype(np.int64), 1, visible)
    return counts


def make_layout(
    pattern: str,
    seq_len: int,
    block: int,
    sparsity: float,
    causal: bool,
    seed: int = 0,
    special: int = 0,
    window: int | None = None,
    mask: VisibleKeys | None = None,
    first_query: int = 0,
) -> BlockLayout:
    """Return the layout of a named pattern.

    sparsity: fraction of the visible blocks to skip, in [0, 1); each row keeps (1 - sparsity) of
    them, rounded, at least one.
    special: global or sink tokens (global-local, sink-window). Rows of global tokens keep all
    visible blocks. A row that keeps too few blocks for all special ones keeps the diagonal first.
    seed: any integer, taken modulo 2^64; used by `random` and `indices` only.
    window: full width in tokens, rounded up to blocks; None: it follows from sparsity. With
    `local-window`, `sink-window` and `global-local` it replaces sparsity: a row keeps the special
    blocks and the window. With `strided` it is the minimum width of the window; the columns get the
    other blocks that sparsity keeps.
    mask: each row has the pattern among the blocks that the mask shows, so that each document has
    its own global, sink and strided blocks.
    first_query: rows of blocks before it stay empty: a step of decoding has no query there.

    Errors are those of check_options.
    """
    check_options(pattern, seq_len, block, sparsity, special, window)
    rows, special_blocks = -(-seq_len // block), -(-special // block)
    window_blocks = None if window is None else min(rows, -(-window // block))
    base, stop_block = visible_blocks(seq_len, block, causal, mask)
    visible, row, first_row = stop_block - base, np.arange(rows) - base, first_query // block
    full_rows = special_blocks if mask is None and pattern == "global-local" else 0
    counts = row_counts(pattern, seq_len, block, sparsity, causal, special, window, mask)
    counts[:first_row] = 0
    stride = 0
    if pattern == "strided":
        stride = _stride(rows, block, sparsity, int(counts[-1]), window_blocks)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices = np.empty(indptr[-1], dtype=np.int32)
    for start, stop in _chunks(counts, first_row, full_rows):
        of_rows, visible_of_rows, kept = (x[start:stop, None] for x in (row, visible, counts))
        slot = np.arange(int(kept.max()))[None, :]
        own = seed, special_blocks, stride, window_blocks or 1
        part = LayoutRows(of_rows, visible_of_rows, kept, slot, *own)
        table = PATTERNS[pattern](part) + base[start:stop, None]
        indices[indptr[start] : indptr[stop]] = table[part.slot < kept]
    return BlockLayout(seq_len, block, causal, indptr, indices, mask, first_query)


def row_counts(
    pattern: str,
    seq_len: int,
    block: int,
    sparsity: float,
    causal: bool,
    special: int = 0,
    window: int | None = None,
    mask: VisibleKeys | None = None,
) -> Ints:
    """Return the kept blocks of each row of a named pattern, (rows,); see make_layout."""
    base, stop_block = visible_blocks(seq_len, block, causal, mask)
    visible, special_blocks = stop_block - base, -(-special // block)
    counts = kept_counts(visible, sparsity)
    if window is not None and pattern != "strided":
        counts = np.minimum(visible, special_blocks + min(len(visible), -(-window // block)))
    if pattern == "global-local":
        is_full = np.arange(len(visible)) - base < special_blocks
        counts[is_full] = visible[is_full]
    return counts


def _stride(rows: int, block: int, sparsity: float, kept: int, window: int | None) -> int:
    """Return the stride; its multiples get half of the kept blocks, or those outside a window.

    It is at least 2, so that blocks remain between the columns.
    """
    if window is None:
        return min(rows + 1, max(2, round(2 / (1 - sparsity))))
    if window > kept:
        raise UserError(
            f"a window of {window} blocks is more than the {kept} blocks per row that sparsity "
            f"{sparsity:g} keeps; the maximum is {kept * block} tokens"
        )
    return max(2, -(-rows // max(kept - window, 1)))


def _chunks(counts: Ints, first_row: int, full_rows: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of rows whose table has at most CHUNK cells, or of one row.

    Rows begin at first_row. The first `full_rows` rows, which see everything, are wider and not
    mixed with the others.
    """
    for first, end in ((first_row, full_rows), (max(first_row, full_rows), len(counts))):
        step = max(1, CHUNK // int(counts[first:end].max(initial=1)))
        for start in range(first, end, step):
            yield start, min(end, start + step)


def window_start(row: Ints, visible: Ints, width: Ints, first: Ints | int = 0) -> Ints:
    """Return the start of a window of `width` blocks around a row, not before `first`.

    A causal row sees no block after its own, so that the window ends there.
    """
    start: Ints = np.clip(row - width // 2, first, visible - width)
    return start


def _local_window(rows: LayoutRows) -> Ints:
    return window_start(rows.row, rows.visible, rows.kept) + rows.slot


def _special_and_window(rows: LayoutRows) -> Ints:
    """Keep the first blocks, then a window; the diagonal has priority over special blocks."""
    special = np.minimum(rows.special, rows.kept - 1)
    start = window_start(rows.row, rows.visible, rows.kept - special, special)
    return rows.slot + np.where(rows.slot < special, 0, start - special)


def _strided(rows: LayoutRows) -> Ints:
    """Keep columns (multiples of the stride, the same for all rows) and a window between them.

    A row that keeps too few blocks for its window and all visible multiples has the first of those.
    The window is chosen among the blocks outside the columns, which are numbered without gaps:
    number u is block u + (columns before it). With the columns inside, it is one run of blocks.

    Example: 100 blocks, stride 20, not causal; row 50 keeps 10 blocks. The columns are 0, 20, 40,
    60 and 80. Row 50 has number 47, after 3 columns; the window has numbers 45 ... 49, blocks 48
    ... 52. The row keeps 0, 20, 40, 48 ... 52, 60, 80.
    """
    stride = rows.stride
    columns = np.minimum(-(-rows.visible // stride), np.maximum(rows.kept - rows.window, 0))
    width = rows.kept - columns
    row_number = rows.row - np.minimum(-(-rows.row // stride), columns)
    outside = rows.visible - columns
    first = window_start(row_number, outside, width)
    last = first + width - 1
    columns_before = np.minimum(first // (stride - 1) + 1, columns)
    run_end = width + np.minimum(last // (stride - 1) + 1, columns)
    return np.where(
        rows.slot < columns_before,
        rows.slot * stride,
        np.where(rows.slot < run_end, first + rows.slot, (rows.slot - width) * stride),
    )


def _random(rows: LayoutRows) -> Ints:
    """Keep half in a window and draw half."""
    return _drawn(rows, (rows.kept + 1) // 2)


def _indices(rows: LayoutRows) -> Ints:
    """Keep the own block and draw the others: a list of as many blocks as a top k of scores has."""
    return _drawn(rows, np.ones_like(rows.kept))


def _drawn(rows: LayoutRows, width: Ints) -> Ints:
    """Keep a window of `width` blocks, and draw one block from each of equal strata of the rest.

    Draws never collide. A draw depends only on the seed, the row and its index.
    """
    start = window_start(rows.row, rows.visible, width)
    draws, room = np.maximum(rows.kept - width, 1), rows.visible - width
    low = (rows.slot - width) * room // draws
    high = (rows.slot - width + 1) * room // draws
    number = low + (_uniform(rows) * np.maximum(high - low, 1)).astype(np.int64)
    block = np.where(number < start, number, number + width)
    table = np.where(rows.slot < width, start + rows.slot, block)
    table[rows.slot >= rows.kept] = np.iinfo(np.int64).max
    table.sort(axis=1)
    return table


def _both_sides(side: Side, rows: LayoutRows) -> Ints:
    """Keep the diagonal and half of the rest on each side, more if the other side is short.

    Blocks after the diagonal are those before its mirror image, -row, mirrored.
    """
    others, room_after = rows.kept - 1, rows.visible - 1 - rows.row
    before = np.minimum(rows.row, (others + 1) // 2)
    after = np.minimum(room_after, others - before)
    before = others - after
    nth = np.clip(before - 1 - rows.slot, 0, np.maximum(before - 1, 0))
    table = np.where(rows.slot < before, side(rows.row, nth, before, rows.row), rows.row)
    if after.any():
        nth = np.clip(rows.slot - before - 1, 0, np.maximum(after - 1, 0))
        table = np.where(rows.slot > before, -side(-rows.row, nth, after, room_after), table)
    return table


def _growing_distances(row: Ints, nth: Ints, count: Ints, room: Ints) -> Ints:
    """Keep distances 2^x with x in even steps up to log2 of the room. A Side.

    2^x and log2 are linear between powers of two, so that integers are exact. 2^x - nth is convex
    in nth, so its maximum up to nth is at 0 or at nth; nth + that maximum ascends strictly.
    """
    count = np.maximum(count, 1)
    log_room = _log2(np.maximum(room, 1))
    step = log_room // count
    nearest = _power(log_room - step * (count - 1))
    lead = np.maximum(nearest, _power(log_room - step * (count - 1 - nth)) - nth)
    distance: Ints = np.minimum(nth + lead, room - (count - 1 - nth))
    return row - distance


def _log2(n: Ints) -> Ints:
    """Return log2, linear between powers of two, with _FRACTION fractional bits; n < 2^31."""
    whole = _whole_log2(n)
    return (n << (_FRACTION - whole)) + ((whole - 1) << _FRACTION)


def _whole_log2(n: Ints) -> Ints:
    whole: Ints = np.frexp(n)[1].astype(np.int64) - 1
    return whole


def _power(x: Ints) -> Ints:
    """Return the inverse of _log2, rounded down."""
    one = 1 << _FRACTION
    power: Ints = ((one + (x & (one - 1))) << (x >> _FRACTION)) >> _FRACTION
    return power


def _doubling_strides(row: Ints, nth: Ints, count: Ints, room: Ints) -> Ints:
    """Keep equally many blocks at each of the strides 1, 2, 4, ...; each stride is a level.

    Level l has the next multiples of 2^l before the blocks of the level below. The finest levels
    get one more block each if the count is not divisible. If one block per level does not fill the
    room, strides grow faster, by powers of two spread evenly over the levels. Strides never fall
    with the distance.

    Example: 5 blocks before row 20. Five levels would reach 31 blocks back, four reach at most 16,
    so there are four: level 0 has 19 and 18, level 1 has 16, level 2 has 12, level 3 has 8.
    """
    levels = _max_levels(count, room)
    per_level, larger_levels = count // levels, count % levels
    log_room = np.maximum(_whole_log2(room + 1) - 1, 0)
    top = np.where(levels == count, log_room, levels - 1)
    nearest_of_level = np.empty((len(row), int(levels.max())), dtype=np.int64)
    last_block = row
    for level in range(nearest_of_level.shape[1]):
        log_stride = np.clip(level * top // np.maximum(levels - 1, 1), 0, top)
        nearest = (last_block - 1) >> log_stride << log_stride
        nearest_of_level[:, level] = nearest[:, 0]
        last_block = nearest - ((per_level + (level < larger_levels) - 1) << level)
    in_larger_levels = larger_levels * (per_level + 1)
    smaller_level = larger_levels + (nth - in_larger_levels) // np.maximum(per_level, 1)
    level_of = np.where(nth < in_larger_levels, nth // (per_level + 1), smaller_level)
    # levels with several blocks have the stride 2^level
    index = nth - level_of * per_level - np.minimum(level_of, larger_levels)
    first = np.take_along_axis(nearest_of_level, level_of, axis=1)
    blocks: Ints = first - (index << level_of)
    return blocks


def _max_levels(count: Ints, room: Ints) -> Ints:
    """Return the largest number of levels, at least one, whose blocks stay within the room."""
    max_levels = np.ones_like(count)
    for levels in range(2, 32):
        per_level, remainder = count // levels, count % levels
        reach = per_level * (2**levels - 1) + (1 << remainder) - 1
        fits = (per_level > 0) & (reach <= room)
        if not fits.any():
            # the reach grows with the number of levels
            break
        max_levels = np.where(fits, levels, max_levels)
    return max_levels


def _uniform(rows: LayoutRows) -> NDArray[np.float64]:
    """Return numbers in [0, 1) from (seed, row, slot) by the finaliser of splitmix64."""
    x = (rows.row.astype(np.uint64) << np.uint64(24)) + rows.slot.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = x + np.uint64((rows.seed + 1) % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2**53


PATTERNS: dict[str, Pattern] = {
    "local-window": _local_window,
    "dilated-sparse": partial(_both_sides, _growing_distances),
    "global-local": _special_and_window,
    "hierarchical": partial(_both_sides, _doubling_strides),
    "strided": _strided,
    "sink-window": _special_and_window,
    "random": _random,
    "indices": _indices,
}
