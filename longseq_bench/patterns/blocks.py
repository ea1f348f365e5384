"""The block-sparse patterns: which key blocks each query block keeps.

Every pattern keeps exactly the asked number of blocks a row, the diagonal block among them, and is
computed for many rows at once, in whole numbers, so that it is the same on every machine. Letters:
i the row, m the blocks visible to it (i + 1 if causal, all otherwise), c the blocks it keeps.

Key blocks that neighbouring rows share are read once by a kernel: the columns of `strided` are
those of all rows, and `hierarchical` holds each level to multiples of its stride.

Sources: local-window and global-local, Longformer (arXiv 2004.05150); strided, the fixed pattern of
Sparse Transformer (1904.10509); random, BigBird (2007.14062); sink-window, StreamingLLM
(2309.17453); dilated-sparse takes LongNet's growing strides (2307.02486) between blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.patterns.block_layout import BlockLayout, Ints

CHUNK = 2**16
"""Table cells computed at a time: few enough that the tables of a chunk stay in the cache."""

WITH_SPECIAL = ("global-local", "sink-window")
"""Patterns that have global or sink blocks."""

WITH_WINDOW = ("global-local", "local-window", "sink-window", "strided")
"""Patterns whose window can be asked for in tokens."""

_FRACTION = 32
"""Bits behind the point of a logarithm."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a layout, as columns (rows, 1), and k = 0 ... widest - 1 as a row."""

    i: Ints
    m: Ints
    c: Ints
    k: Ints
    seed: int
    special: int
    """Global or sink blocks."""
    stride: int
    """Of `strided`."""
    window: int
    """The least blocks that `strided` keeps for its window."""


Pattern = Callable[[Rows], Ints]
"""Key blocks (rows, widest), ascending; what stands at k >= c is ignored."""


def check_sparsity(sparsity: float) -> None:
    """Raises UserError for a sparsity outside [0, 1), NaN among them."""
    if 0 <= sparsity < 1:
        return
    if 1 < sparsity < 100:
        hint = f"{sparsity:g} % would be {sparsity / 100:g}"
    elif sparsity < 0:
        hint = "0 skips nothing"
    else:
        hint = "0.99 keeps one block in a hundred"
    raise UserError(f"sparsity {sparsity:g} is outside [0, 1); {hint}")


def check_asked(pattern: str, sparsity: float) -> None:
    """Raises UnknownNameError for the pattern, UserError for a sparsity outside [0, 1)."""
    if pattern not in PATTERNS:
        raise UnknownNameError("pattern", pattern, PATTERNS)
    check_sparsity(sparsity)


def check_lengths(seq_len: int, block: int) -> None:
    """Raises UserError for fewer than one token, in the sequence or in a block."""
    if block < 1:
        raise UserError(
            f"block {block} is no number of tokens; 1 is the smallest, 64 or 128 suit most kernels"
        )
    if seq_len < 1:
        raise UserError(f"a sequence of {seq_len} tokens has no layout; it takes 1 or more")


def kept_counts(rows: int, sparsity: float, causal: bool) -> Ints:
    """Blocks that each row keeps, (rows,): (1 - sparsity) of the visible, rounded, one at least."""
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
    """The layout of a named pattern.

    sparsity: the fraction of the visible blocks to skip, in [0, 1); each row keeps exactly
    (1 - sparsity) of them, rounded, one at least.
    special: global or sink tokens (global-local, sink-window). The rows of global tokens see
    everything they may, beyond the asked density; the others hold to it. Where a row keeps too few
    blocks for all the special ones, the diagonal comes first.
    seed: any whole number, taken modulo 2^64; only `random` looks at it.
    window: tokens, rounded up to blocks; the whole width, to both sides and the own block together.
    None: what sparsity leaves. With `local-window`, `sink-window` and `global-local` it takes the
    place of sparsity: a row keeps the special blocks and so wide a window, or all it may see. With
    `strided` sparsity holds, the window is at least so wide, or as wide as the row keeps blocks,
    and the columns get what is left.
    Raises UnknownNameError for the pattern, UserError for the rest.
    """
    check_asked(pattern, sparsity)
    check_lengths(seq_len, block)
    _check_special(pattern, seq_len, special)
    rows, own = -(-seq_len // block), -(-special // block)
    wide = None if window is None else min(rows, _window_blocks(pattern, block, window))
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
        table = PATTERNS[pattern](Rows(i, m, c, k, seed, own, stride, wide or 1))
        indices[indptr[start] : indptr[stop]] = table[k < c]
    return BlockLayout(seq_len, block, causal, indptr, indices)


def _visible(rows: int, causal: bool) -> Ints:
    return np.arange(1, rows + 1) if causal else np.full(rows, rows, dtype=np.int64)


def _check_special(pattern: str, seq_len: int, special: int) -> None:
    if special < 0:
        raise UserError(f"{special} global tokens can't be; 0 means none")
    if special > seq_len:
        raise UserError(
            f"{special} global tokens are more than the sequence's {seq_len}; {seq_len} at most"
        )
    if special and pattern not in WITH_SPECIAL:
        raise UserError(
            f"pattern {pattern!r} has no global or sink blocks for {special} tokens; "
            f"{' and '.join(WITH_SPECIAL)} have"
        )


def check_window(pattern: str, block: int, window: int | None) -> None:
    """Raises UserError for a window in a pattern that takes none, or smaller than a block."""
    if window is not None:
        _window_blocks(pattern, block, window)


def _window_blocks(pattern: str, block: int, window: int) -> int:
    """Blocks of a window that was asked for."""
    if pattern not in WITH_WINDOW:
        raise UserError(
            f"pattern {pattern!r} takes no window; "
            f"{', '.join(WITH_WINDOW[:-1])} and {WITH_WINDOW[-1]} do"
        )
    if window < block:
        raise UserError(
            f"a window of {window} tokens is smaller than a block; {block} is the smallest"
        )
    return -(-window // block)


def _stride(rows: int, block: int, sparsity: float, kept: int, window: int | None) -> int:
    """One for the whole layout: half of what is kept lies on its multiples, or what a window
    leaves. Never 1: it would leave no block between the columns."""
    if window is None:
        return min(rows + 1, max(2, round(2 / (1 - sparsity))))
    if window > kept:
        raise UserError(
            f"a window of {window} blocks is more than the {kept} that sparsity {sparsity:g} keeps "
            f"a row; {kept * block} tokens are the widest"
        )
    return max(2, -(-rows // max(kept - window, 1)))


def _chunks(counts: Ints, full: int) -> Iterator[tuple[int, int]]:
    """Start and stop of consecutive rows whose table has CHUNK cells at most, or of one row. Those
    that see everything are not mixed with the others, which are much narrower."""
    for first, end in ((0, full), (full, len(counts))):
        step = max(1, CHUNK // int(counts[first:end].max(initial=1)))
        for start in range(first, end, step):
            yield start, min(end, start + step)


def _window(rows: Rows, width: Ints, first: Ints) -> Ints:
    """Where the window of `width` blocks round i starts, between `first` and the last visible."""
    return np.clip(_before(rows, rows.i, width), first, rows.m - width)


def _before(rows: Rows, at: Ints, width: Ints) -> Ints:
    """The start of `width` places that end with `at` if causal, and lie round it otherwise."""
    return at - np.where(rows.m == rows.i + 1, width - 1, width // 2)


def _local_window(rows: Rows) -> Ints:
    return _window(rows, rows.c, np.zeros_like(rows.i)) + rows.k


def _special_and_window(rows: Rows) -> Ints:
    """The first blocks, then a window; the diagonal comes before the last of them."""
    special = np.minimum(rows.special, rows.c - 1)
    start = _window(rows, rows.c - special, special)
    return rows.k + np.where(rows.k < special, 0, start - special)


def _strided(rows: Rows) -> Ints:
    """The multiples of the stride, the same for all rows, and a window of the blocks between them.

    A row that keeps too few for its window and all the multiples it may see has the first of those.
    The blocks between are numbered: the u-th of them is block u + (multiples before it), so that a
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


def _random(rows: Rows) -> Ints:
    """Half a window, half drawn: one block from each of equal strata of the rest, so that draws
    never collide. A draw depends on the seed, the row and its number alone."""
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


def _dilated(rows: Rows) -> Ints:
    """Distances grow by much the same factor, to both sides where both are visible."""
    return _both_sides(rows, _growing)


def _hierarchical(rows: Rows) -> Ints:
    """As many blocks at stride 1, then at 2, then at 4, ... to both sides."""
    return _both_sides(rows, _levels)


def _both_sides(rows: Rows, side: Callable[[Ints, Ints, Ints, Ints], Ints]) -> Ints:
    """The diagonal, and half of the rest to either side of it, or more where the other is short.

    side(at, j, count, room): the j-th of `count` blocks before `at`, the nearest first, no farther
    than `room`. Those after it are those before -at, mirrored.
    """
    others, after = rows.c - 1, rows.m - 1 - rows.i
    left = np.minimum(rows.i, (others + 1) // 2)
    right = np.minimum(after, others - left)
    left = others - right
    table = np.broadcast_to(rows.i, (len(rows.i), rows.k.size)).copy()
    # each side is computed only where some row has it
    stop, start = int(left.max()), int(left.min()) + 1
    k = rows.k[:, :stop]
    j = np.clip(left - 1 - k, 0, np.maximum(left - 1, 0))
    np.copyto(table[:, :stop], side(rows.i, j, left, rows.i), where=k < left)
    if right.any():
        k = rows.k[:, start:]
        j = np.clip(k - left - 1, 0, np.maximum(right - 1, 0))
        np.copyto(table[:, start:], -side(-rows.i, j, right, after), where=k > left)
    return table


def _growing(at: Ints, j: Ints, count: Ints, room: Ints) -> Ints:
    """Distance 2^x, x rising evenly up to log2 of the room; between powers of two both 2^x and
    log2 run straight, which whole numbers hold exactly.

    2^x is convex, and so is its lead over j: the most it led by up to j is what it leads by at 0
    or at j. Raising the distances to j + that lead makes them strictly ascending.
    """
    count = np.maximum(count, 1)
    logarithm = _log2(np.maximum(room, 1))
    step = logarithm // count
    nearest = _power(logarithm - step * (count - 1))
    lead = np.maximum(nearest, _power(logarithm - step * (count - 1 - j)) - j)
    distance: Ints = np.minimum(j + lead, room - (count - 1 - j))
    return at - distance


def _log2(n: Ints) -> Ints:
    """Straight between powers of two, with _FRACTION bits behind the point; n below 2^31."""
    whole = _whole_log2(n)
    return (n << (_FRACTION - whole)) + ((whole - 1) << _FRACTION)


def _whole_log2(n: Ints) -> Ints:
    whole: Ints = np.frexp(n)[1].astype(np.int64) - 1
    return whole


def _power(x: Ints) -> Ints:
    """The inverse of _log2, rounded down."""
    one = 1 << _FRACTION
    power: Ints = ((one + (x & (one - 1))) << (x >> _FRACTION)) >> _FRACTION
    return power


def _levels(at: Ints, j: Ints, count: Ints, room: Ints) -> Ints:
    """As many blocks a level, one more in the finest where they don't divide; level l holds the
    next multiples of 2^l before those of the level below it. Where one block a level does not
    fill the room, strides grow faster, by powers of two that are even over the levels.

    So a level starts at most its own stride, and at least that of the level below, after that one
    ends; strides never fall, and no block is farther than if the multiples were counted from `at`.
    """
    levels = _most_levels(count, room)
    each, more = count // levels, count % levels
    filling = np.maximum(_whole_log2(room + 1) - 1, 0)
    top = np.where(levels == count, filling, levels - 1)
    firsts = np.empty((len(at), int(levels.max())), dtype=np.int64)
    edge = at
    for level in range(firsts.shape[1]):
        power = np.clip(level * top // np.maximum(levels - 1, 1), 0, top)
        first = (edge - 1) >> power << power
        firsts[:, level] = first[:, 0]
        edge = first - ((each + (level < more) - 1) << level)
    in_larger = more * (each + 1)
    beyond = more + (j - in_larger) // np.maximum(each, 1)
    level_of = np.where(j < in_larger, j // (each + 1), beyond)
    # only levels of several blocks have a block within, and theirs is the stride 2^level
    within = j - level_of * each - np.minimum(level_of, more)
    blocks: Ints = np.take_along_axis(firsts, level_of, axis=1) - (within << level_of)
    return blocks


def _most_levels(count: Ints, room: Ints) -> Ints:
    """The most levels, one at least, that at strides of exactly 2^l stay in the room.

    One level more moves blocks to a larger stride, so the reach only grows with the levels.
    """
    levels = np.ones_like(count)
    for more in range(2, 32):
        each, extra = count // more, count % more
        reach = each * (2**more - 1) + (1 << extra) - 1
        fits = (each > 0) & (reach <= room)
        if not fits.any():
            break
        levels = np.where(fits, more, levels)
    return levels


def _uniform(rows: Rows) -> NDArray[np.float64]:
    """Numbers in [0, 1) from (seed, row, k) by splitmix64's finaliser, the same everywhere."""
    x = (rows.i.astype(np.uint64) << np.uint64(24)) + rows.k.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = x + np.uint64((rows.seed + 1) % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2**53


PATTERNS: dict[str, Pattern] = {
    "local-window": _local_window,
    "dilated-sparse": _dilated,
    "global-local": _special_and_window,
    "hierarchical": _hierarchical,
    "strided": _strided,
    "sink-window": _special_and_window,
    "random": _random,
}
