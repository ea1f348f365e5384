"""The block-sparse patterns: which key blocks each query block keeps.

Every pattern keeps exactly the asked number of blocks a row, the diagonal block among them, and is
computed for many rows at once. Letters: i the row, m the blocks visible to it (i + 1 if causal, all
otherwise), c the blocks it keeps.

Sources: local-window and global-local, Longformer (arXiv 2004.05150); strided, Sparse Transformer
(1904.10509); random, BigBird (2007.14062); sink-window, StreamingLLM (2309.17453); dilated-sparse
takes LongNet's growing strides (2307.02486) between blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.errors import UnknownNameError, UserError
from longseq_bench.patterns.layout import BlockLayout, Ints

CHUNK = 2**20
"""Table cells computed at a time, so that memory stays near what is kept."""

_NONE = np.int64(2**31 - 1)


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


Pattern = Callable[[Rows], Ints]
"""Key blocks (rows, widest); what stands at k >= c is ignored."""


def check_asked(pattern: str, sparsity: float) -> None:
    """Raises UnknownNameError for the pattern, UserError for a sparsity outside [0, 1)."""
    if pattern not in PATTERNS:
        raise UnknownNameError("pattern", pattern, PATTERNS)
    if not 0 <= sparsity < 1:
        raise UserError(
            f"sparsity {sparsity:g} is outside [0, 1); 0.99 keeps one block in a hundred"
        )


def make_layout(
    pattern: str,
    seq_len: int,
    block: int,
    sparsity: float,
    causal: bool,
    seed: int = 0,
    special: int = 0,
) -> BlockLayout:
    """The layout of a named pattern.

    sparsity: the fraction of the visible blocks to skip, in [0, 1); each row keeps (1 - sparsity)
    of them, rounded, one at least.  special: global or sink tokens (global-local, sink-window).
    The rows of global tokens see everything they may, beyond the asked density; the others hold to
    it. Where a row keeps too few blocks for all the special ones, the diagonal comes first.
    seed: any whole number, taken modulo 2^64; only `random` looks at it.
    Raises UnknownNameError for the pattern, UserError for the rest.
    """
    check_asked(pattern, sparsity)
    if block < 1:
        raise UserError(f"block {block} is no number of tokens; 64 or 128 suit most kernels")
    if seq_len < 1:
        raise UserError(f"a sequence of {seq_len} tokens has no layout; it takes 1 or more")
    if special < 0:
        raise UserError(f"{special} global tokens can't be; 0 means none")
    if special > seq_len:
        raise UserError(f"{special} global tokens are more than the sequence's {seq_len}")
    rows = -(-seq_len // block)
    own = -(-special // block)
    everything = own if pattern == "global-local" else 0
    parts = list(_parts(PATTERNS[pattern], rows, sparsity, causal, seed, own, everything))
    counts = np.concatenate([counts for counts, _ in parts])
    indptr = np.concatenate(([0], np.cumsum(counts)))
    return BlockLayout(seq_len, block, causal, indptr, np.concatenate([keys for _, keys in parts]))


def _parts(
    pattern: Pattern, rows: int, sparsity: float, causal: bool, seed: int, special: int, full: int
) -> Iterator[tuple[Ints, NDArray[np.int32]]]:
    """Counts and key blocks of consecutive rows, a chunk of rows at a time."""
    start = 0
    while start < rows:
        # the widest row, and where rows of its kind end: a chunk never mixes full rows with others
        kept = max(1, round((1 - sparsity) * rows))
        widest, end = (rows, full) if start < full else (kept, rows)
        stop = min(end, start + max(1, CHUNK // widest))
        i = np.arange(start, stop, dtype=np.int64)[:, None]
        m = i + 1 if causal else np.full_like(i, rows)
        c = np.clip(np.rint((1 - sparsity) * m).astype(np.int64), 1, m)
        c = np.where(i < full, m, c)
        k = np.arange(int(c.max()), dtype=np.int64)[None, :]
        table = np.where(k < c, pattern(Rows(i, m, c, k, seed, special)), _NONE)
        table.sort(axis=1)
        yield c[:, 0], table[table != _NONE].astype(np.int32)
        start = stop


def _window(rows: Rows, width: Ints, first: Ints) -> Ints:
    """Where the window of `width` blocks round i starts, between `first` and the last visible."""
    causal_or_centred = np.where(rows.m == rows.i + 1, rows.i - width + 1, rows.i - width // 2)
    return np.clip(causal_or_centred, first, rows.m - width)


def _rest(start: Ints, width: Ints, at: Ints) -> Ints:
    """The at-th visible block outside the window."""
    return np.where(at < start, at, at + width)


def _local_window(rows: Rows) -> Ints:
    return _window(rows, rows.c, np.zeros_like(rows.i)) + rows.k


def _special_and_window(rows: Rows) -> Ints:
    """The first blocks, then a window; the diagonal comes before the last of them."""
    special = np.minimum(rows.special, rows.c - 1)
    start = _window(rows, rows.c - special, special)
    return np.where(rows.k < special, rows.k, start + rows.k - special)


def _strided(rows: Rows) -> Ints:
    """Half a window, half evenly strided over the rest."""
    width = (rows.c + 1) // 2
    start = _window(rows, width, np.zeros_like(rows.i))
    others = np.maximum(rows.c - width, 1)
    at = (rows.k - width) * (rows.m - width) // others
    return np.where(rows.k < width, start + rows.k, _rest(start, width, at))


def _random(rows: Rows) -> Ints:
    """Half a window, half drawn: one block from each of equal strata of the rest, so that draws
    never collide. A draw depends on the seed, the row and its number alone."""
    width = (rows.c + 1) // 2
    start = _window(rows, width, np.zeros_like(rows.i))
    others, room = np.maximum(rows.c - width, 1), rows.m - width
    low = (rows.k - width) * room // others
    high = (rows.k - width + 1) * room // others
    at = low + (_uniform(rows) * np.maximum(high - low, 1)).astype(np.int64)
    return np.where(rows.k < width, start + rows.k, _rest(start, width, at))


def _dilated(rows: Rows) -> Ints:
    """Distances grow by a constant factor, to both sides where both are visible."""
    return _by_distance(rows, _geometric)


def _hierarchical(rows: Rows) -> Ints:
    """Distances in levels: as many blocks at stride 1, then at 2, then at 4, ..."""
    return _by_distance(rows, _levels)


def _by_distance(rows: Rows, distances: Callable[[Ints, Ints, Ints], Ints]) -> Ints:
    """The diagonal, then blocks to the left and to the right at given distances."""
    others = rows.c - 1
    after = rows.m - 1 - rows.i
    left = np.minimum(rows.i, (others + 1) // 2)
    right = np.minimum(after, others - left)
    left = others - right
    k = rows.k - 1
    to_left = rows.i - _ascending(distances(k, left, rows.i), k, left, rows.i)
    k_right = k - left
    to_right = rows.i + _ascending(distances(k_right, right, after), k_right, right, after)
    return np.where(rows.k == 0, rows.i, np.where(k < left, to_left, to_right))


def _ascending(distance: Ints, k: Ints, count: Ints, room: Ints) -> Ints:
    """Made strictly ascending from 1 and kept within the room that is left for those to come."""
    rising = np.maximum.accumulate(np.where(k >= 0, np.maximum(distance, k + 1) - k, 1), axis=1) + k
    return np.minimum(rising, room - (count - 1 - k))


def _geometric(k: Ints, count: Ints, room: Ints) -> Ints:
    exponent = np.clip((k + 1) / np.maximum(count, 1), 0, 1)
    grown: Ints = np.floor(np.maximum(room, 1) ** exponent + 1e-9).astype(np.int64)
    return grown


def _levels(k: Ints, count: Ints, room: Ints) -> Ints:
    """With L levels of count / L blocks the farthest is (2^L - 1) count / L away: take the most
    levels that stay in the room."""
    levels = np.ones_like(count)
    for more in range(2, 24):
        levels = np.where((2**more - 1) * count <= room * more, more, levels)
    a_level = np.maximum(count / levels, 1)
    level = np.clip(np.floor(np.maximum(k, 0) / a_level), 0, levels - 1)
    before = (2**level - 1) * a_level
    far: Ints = np.floor(before + (k + 1 - level * a_level) * 2**level).astype(np.int64)
    return far


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
