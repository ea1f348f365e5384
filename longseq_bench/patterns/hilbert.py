"""A walk through the sequence along the Hilbert curve (Hilbert, Math. Ann. 38, 1891).

The sequence fills a square grid row by row; its side is the smallest power of two that holds it.
The walk follows the Hilbert curve over the grid and skips cells beyond the sequence. Neighbours on
the walk are neighbours on the grid, except where cells are skipped.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UnsupportedError, UserError

Cells = NDArray[np.int32]

MAX_SIDE = 2**15
"""The largest side of a grid whose cells can be numbered in int32."""


def grid_side(n: int) -> int:
    """Return the smallest power of two whose square is at least n."""
    return 1 << math.isqrt(n - 1).bit_length()


def hilbert_order(n: int) -> Cells:
    """Return the position of each step of the walk, (n,) int32: a permutation of range(n).

    Raises UserError for n < 1, UnsupportedError for n > 2^30, the limit of int32.
    """
    if n < 1:
        raise UserError(f"a Hilbert walk needs at least 1 token, not {n}")
    side = grid_side(n)
    if side > MAX_SIDE:
        raise UnsupportedError(
            f"the Hilbert walk numbers its grid in int32: {MAX_SIDE**2} tokens at most, not {n}"
        )
    if side == 1:
        return np.zeros(1, dtype=np.int32)
    half = side // 2
    row, col = _curve(half)
    cell = np.empty((4, half * half), dtype=np.int32)
    # one quarter at a time, so that the full square's rows and columns are never in memory
    for out, (r, c) in zip(cell, _quarters(row, col, half), strict=True):
        np.multiply(r, np.int32(side), out=out)
        out += c
    walk = cell.reshape(-1)
    return walk[walk < n] if n < side * side else walk


def _curve(side: int) -> tuple[Cells, Cells]:
    """Return row and column of each step over a square, by doubling the side."""
    row = col = np.zeros(1, dtype=np.int32)
    half = 1
    while half < side:
        rows, cols = zip(*_quarters(row, col, half), strict=True)
        row, col = np.concatenate(rows), np.concatenate(cols)
        half *= 2
    return row, col


def _quarters(row: Cells, col: Cells, half: int) -> Iterator[tuple[Cells, Cells]]:
    """Yield the curve over the four quarters: transposed, plain, plain, anti-transposed."""
    yield col, row
    yield row, col + half
    yield row + half, col + half
    yield 2 * half - 1 - col, half - 1 - row
