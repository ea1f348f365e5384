"""Block-sparse patterns: the key blocks that each query block keeps.

Every pattern keeps exactly the requested number of blocks per row, the diagonal block included. It
is computed for many rows at once in integers, so it is the same on every machine. Letters: i the
row, m the blocks visible to it (i + 1 if causal, else all), c the blocks it keeps.

A kernel reads key blocks that neighbouring rows share once: `strided` has the same columns in all
rows, and the levels of `hierarchical` lie on multiples of their strides.

Sources: local-window and global-local, Longformer (arXiv 2004.05150); strided, the fixed pattern of
Sparse Transformer (1904.10509); random, BigBird (2007.14062); sink-window, StreamingLLM
(2309.17453); dilated-sparse takes LongNet's growing strides (2307.02486) between blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UnknownNameError, UnsupportedError, UserError
from longseq_bench.patterns.block_layout import BlockLayout, Ints

CHUNK = 2**16
"""Table cells per chunk: few enough for the cache."""

WITH_SPECIAL = ("global-local", "sink-window")
"""Patterns with global or sink blocks."""

WITH_WINDOW = ("global-local", "local-window", "sink-window", "strided")
"""Patterns with a window that can be set in tokens."""

_FRACTION = 32
"""Fractional bits of a fixed-point logarithm."""


@dataclass(frozen=True)
class LayoutRows:
    """Rows of a layout as columns (rows, 1), and k = 0 ... widest - 1 as a row.

    special: global or sink blocks.  stride: of `strided`.  window: least blocks of its window.
    """

    i: Ints
    m: Ints
    c: Ints
    k: Ints
    seed: int
    special: int
    stride: int
    window: int


Pattern = Callable[[LayoutRows], Ints]
"""Returns key blocks (rows, widest), ascending; entries at k >= c are ignored."""

Side = Callable[[Ints, Ints, Ints, Ints], Ints]
"""side(i, j, count, room): the j-th nearest of `count` blocks before i, at most `room` away."""


def check_sparsity(sparsity: float) -> None:
    """Raise UserError for a sparsity outside [0, 1) or NaN."""
    if 0 <= sparsity < 1:
        return
    if 1 < sparsity < 100:
        hint = f"{sparsity:g} % would be {sparsity / 100:g}"
    elif sparsity < 0:
        hint = "0 skips nothing"
    else:
        hint = "0.99 keeps one block in a hundred"
    raise UserError(f"sparsity {sparsity:g} is outside [0, 1); {hint}")


def check_pattern(pattern: str, sparsity: float) -> None:
    """Raise UnknownNameError for a pattern, UserError for a sparsity outside [0, 1)."""
    if pattern not in PATTERNS:
        raise UnknownNameError("pattern", pattern, PATTERNS)
    check_sparsity(sparsity)


def check_lengths(seq_len: int, block: int) -> None:
    """Raise UserError for fewer than one token in the sequence or in a block."""
    if block < 1:
        raise UserError(
            f"block {block} is too small; the minimum is 1, and 64 or 128 suit most kernels"
        )
    if seq_len < 1:
        raise UserError(f"a sequence of {seq_len} tokens has no layout; use 1 token or more")


def kept_counts(rows: int, sparsity: float, causal: bool) -> Ints:
    """Return the blocks per row, (rows,): (1 - sparsity) of the visible, rounded, 1 or more."""
    m = _visible(rows, causal)
    counts: Ints = np.clip(np.rint((1 - sparsity) * m).astype(np.int64), 1, m)
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
) -> BlockLayout:
    """Return the layout of a named pattern.

    sparsity: fraction of the visible blocks to skip, in [0, 1); each row keeps (1 - sparsity) of
    them, rounded, at least one.
    special: global or sink tokens (global-local, sink-window). Rows of global tokens keep all
    visible blocks. A row that keeps too few blocks for all special ones keeps the diagonal first.
    seed: any integer, taken modulo 2^64; used by `random` only.
    window: full width in tokens, rounded up to blocks; None: what sparsity leaves. With
    `local-window`, `sink-window` and `global-local` it replaces sparsity: a row keeps the special
    blocks and the window. With `strided` it is the least width of the window within sparsity; the
    columns get the remaining blocks.

    Raises UnknownNameError for the pattern, UserError for other arguments.
    """
    check_pattern(pattern, sparsity)
    check_lengths(seq_len, block)
    check_special(pattern, seq_len, special)
    check_window(pattern, block, window)
    rows, own = -(-seq_len // block), -(-special // block)
    wide = None if window is None else min(rows, -(-window // block))
    full = own if pattern == "global-local" else 0
    counts, visible = kept_counts(rows, sparsity, causal), _visible(rows, causal)
    stride = 0
    if pattern == "strided":
        stride = _stride(rows, block, sparsity, int(counts[-1]), wide)
    elif wide is not None:
        counts = np.minimum(visible, own + wide)
    counts[:full] = visible[:full]
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices = np.empty(indptr[-1], dtype=np.int32)
    for start, stop in _chunks(counts, full):
        i = np.arange(start, stop)[:, None]
        m, c = visible[start:stop, None], counts[start:stop, None]
        k = np.arange(int(c.max()))[None, :]
        table = PATTERNS[pattern](LayoutRows(i, m, c, k, seed, own, stride, wide or 1))
        indices[indptr[start] : indptr[stop]] = table[k < c]
    return BlockLayout(seq_len, block, causal, indptr, indices)


def _visible(rows: int, causal: bool) -> Ints:
    return np.arange(1, rows + 1) if causal else np.full(rows, rows, dtype=np.int64)


def check_special(pattern: str, seq_len: int, special: int) -> None:
    """Raise UserError for a pattern without special tokens, UnsupportedError for too many."""
    if special and pattern not in WITH_SPECIAL:
        raise UserError(
            f"globals={special} is not supported by pattern={pattern}; "
            f"use {' or '.join(WITH_SPECIAL)}"
        )
    if special > seq_len:
        raise UnsupportedError(f"globals={special} is more than the {seq_len} tokens there are")


def check_window(pattern: str, block: int, window: int | None) -> None:
    """Raise UserError for a window smaller than a block or in a pattern without one."""
    if window is None:
        return
    if pattern not in WITH_WINDOW:
        raise UserError(
            f"window is not supported by pattern={pattern}; "
            f"use {', '.join(WITH_WINDOW[:-1])} or {WITH_WINDOW[-1]}"
        )
    if window < block:
        raise UserError(
            f"a window of {window} tokens is smaller than a block; the minimum is {block}"
        )


def _stride(rows: int, block: int, sparsity: float, kept: int, window: int | None) -> int:
    """Return the stride: its multiples get half of the kept blocks, or what a window leaves.

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


def _chunks(counts: Ints, full: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of rows whose table has at most CHUNK cells, or of one row.

    The first `full` rows, which see everything, are wider and not mixed with the others.
    """
    for first, end in ((0, full), (full, len(counts))):
        step = max(1, CHUNK // int(counts[first:end].max(initial=1)))
        for start in range(first, end, step):
            yield start, min(end, start + step)


def _window(rows: LayoutRows, width: Ints, first: Ints) -> Ints:
    """Return the start of a window of `width` blocks around i, `first` or later."""
    return np.clip(_before(rows, rows.i, width), first, rows.m - width)


def _before(rows: LayoutRows, at: Ints, width: Ints) -> Ints:
    """Return the start of `width` blocks that end with `at` if causal, else lie around it."""
    return at - np.where(rows.m == rows.i + 1, width - 1, width // 2)


def _local_window(rows: LayoutRows) -> Ints:
    return _window(rows, rows.c, np.zeros_like(rows.i)) + rows.k


def _special_and_window(rows: LayoutRows) -> Ints:
    """Keep the first blocks, then a window; the diagonal has priority over special blocks."""
    special = np.minimum(rows.special, rows.c - 1)
    start = _window(rows, rows.c - special, special)
    return rows.k + np.where(rows.k < special, 0, start - special)


def _strided(rows: LayoutRows) -> Ints:
    """Keep the multiples of the stride, the same for all rows, and a window of blocks between them.

    A row that keeps too few blocks for its window and all visible multiples has the first of those.
    The blocks between multiples are numbered: the u-th is block u + (multiples before it). So a
    window of r of them, with the multiples inside, is one run, and the count is exact.
    """
    stride = rows.stride
    columns = np.minimum(-(-rows.m // stride), np.maximum(rows.c - rows.window, 0))
    r = rows.c - columns
    number = rows.i - np.minimum(-(-rows.i // stride), columns)
    first = np.clip(_before(rows, number, r), 0, rows.m - columns - r)
    columns_before = np.minimum(first // (stride - 1) + 1, columns)
    last = first + r - 1
    run_end = r + np.minimum(last // (stride - 1) + 1, columns)
    return np.where(
        rows.k < columns_before,
        rows.k * stride,
        np.where(rows.k < run_end, first + rows.k, (rows.k - r) * stride),
    )


def _random(rows: LayoutRows) -> Ints:
    """Keep half in a window and draw half: one block from each of equal strata of the rest.

    Draws never collide. A draw depends only on the seed, the row and its index.
    """
    width = (rows.c + 1) // 2
    start = _window(rows, width, np.zeros_like(rows.i))
    others, room = np.maximum(rows.c - width, 1), rows.m - width
    low = (rows.k - width) * room // others
    high = (rows.k - width + 1) * room // others
    at = low + (_uniform(rows) * np.maximum(high - low, 1)).astype(np.int64)
    drawn = np.where(at < start, at, at + width)
    table = np.where(rows.k < width, start + rows.k, drawn)
    table[rows.k >= rows.c] = np.iinfo(np.int64).max
    table.sort(axis=1)
    return table


def _both_sides(side: Side, rows: LayoutRows) -> Ints:
    """Keep the diagonal and half of the rest on each side, more if the other side is short.

    Blocks after the diagonal are those before its mirror image, -i, mirrored.
    """
    others, after = rows.c - 1, rows.m - 1 - rows.i
    left = np.minimum(rows.i, (others + 1) // 2)
    right = np.minimum(after, others - left)
    left = others - right
    table = np.broadcast_to(rows.i, (len(rows.i), rows.k.size)).copy()
    # compute each side only for the columns that some row uses
    stop, start = int(left.max()), int(left.min()) + 1
    k = rows.k[:, :stop]
    j = np.clip(left - 1 - k, 0, np.maximum(left - 1, 0))
    np.copyto(table[:, :stop], side(rows.i, j, left, rows.i), where=k < left)
    if right.any():
        k = rows.k[:, start:]
        j = np.clip(k - left - 1, 0, np.maximum(right - 1, 0))
        np.copyto(table[:, start:], -side(-rows.i, j, right, after), where=k > left)
    return table


def _distances_grow(i: Ints, j: Ints, count: Ints, room: Ints) -> Ints:
    """Keep distances 2^x with x in even steps up to log2 of the room. A Side.

    2^x and log2 are linear between powers of two, so that integers are exact. 2^x - j is convex in
    j, so its maximum up to j is at 0 or at j; distances j + that maximum ascend strictly.
    """
    count = np.maximum(count, 1)
    logarithm = _log2(np.maximum(room, 1))
    step = logarithm // count
    nearest = _power(logarithm - step * (count - 1))
    lead = np.maximum(nearest, _power(logarithm - step * (count - 1 - j)) - j)
    distance: Ints = np.minimum(j + lead, room - (count - 1 - j))
    return i - distance


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


def _strides_double(i: Ints, j: Ints, count: Ints, room: Ints) -> Ints:
    """Keep equally many blocks at each of the strides 1, 2, 4, ..., which are levels. A Side.

    Level l holds the next multiples of 2^l before the blocks of the level below; the finest levels
    get the remainder. If one block per level does not fill the room, strides grow faster, by equal
    powers of two per level. Strides never fall, and no block is farther than multiples counted from
    i.
    """
    levels = _max_levels(count, room)
    each, more = count // levels, count % levels
    filling = np.maximum(_whole_log2(room + 1) - 1, 0)
    top = np.where(levels == count, filling, levels - 1)
    # the nearest block of each level
    nearest = np.empty((len(i), int(levels.max())), dtype=np.int64)
    edge = i
    for level in range(nearest.shape[1]):
        power = np.clip(level * top // np.maximum(levels - 1, 1), 0, top)
        first = (edge - 1) >> power << power
        nearest[:, level] = first[:, 0]
        edge = first - ((each + (level < more) - 1) << level)
    in_larger_levels = more * (each + 1)
    smaller_level = more + (j - in_larger_levels) // np.maximum(each, 1)
    level_of = np.where(j < in_larger_levels, j // (each + 1), smaller_level)
    # levels with several blocks have the stride 2^level
    index = j - level_of * each - np.minimum(level_of, more)
    blocks: Ints = np.take_along_axis(nearest, level_of, axis=1) - (index << level_of)
    return blocks


def _max_levels(count: Ints, room: Ints) -> Ints:
    """Return the most levels, at least one, whose blocks stay within the room."""
    levels = np.ones_like(count)
    for more in range(2, 32):
        each, extra = count // more, count % more
        reach = each * (2**more - 1) + (1 << extra) - 1
        fits = (each > 0) & (reach <= room)
        if not fits.any():
            # the reach grows with the number of levels
            break
        levels = np.where(fits, more, levels)
    return levels


def _uniform(rows: LayoutRows) -> NDArray[np.float64]:
    """Return numbers in [0, 1) from (seed, row, k) by the finaliser of splitmix64."""
    x = (rows.i.astype(np.uint64) << np.uint64(24)) + rows.k.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = x + np.uint64((rows.seed + 1) % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2**53


PATTERNS: dict[str, Pattern] = {
    "local-window": _local_window,
    "dilated-sparse": partial(_both_sides, _distances_grow),
    "global-local": _special_and_window,
    "hierarchical": partial(_both_sides, _strides_double),
    "strided": _strided,
    "sink-window": _special_and_window,
    "random": _random,
}
