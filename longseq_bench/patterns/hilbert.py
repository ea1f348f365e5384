"""A walk through the sequence along the Hilbert curve.

The sequence is laid row by row on a grid whose side is the smallest power of two that holds it;
the walk follows the Hilbert curve (Hilbert, Math. Ann. 38, 1891) over the grid, cells beyond the
sequence cut out. Neighbours on the walk are neighbours on the grid, so a run of the walk is a
compact patch; only where cells were cut out does the walk jump.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UnsupportedError, UserError

Cells = NDArray[np.int32]
Ints = TypeVar("Ints", NDArray[np.int32], NDArray[np.int64])

LARGEST_SIDE = 2**15
"""The largest side whose cells can be numbered in int32."""


def grid_side(n: int) -> int:
    """The smallest power of two whose square holds n cells."""
    side = 1
    while side * side < n:
        side *= 2
    return side


def hilbert_order(n: int) -> Cells:
    """Position of each step of the walk, (n,) int32: a permutation of range(n).

    Raises UserError for n < 1, UnsupportedError beyond 2^30, where int32 ends.
    """
    if n < 1:
        raise UserError(f"a walk through {n} tokens has no step; it takes 1 or more")
    side = grid_side(n)
    if side > LARGEST_SIDE:
        raise UnsupportedError(
            f"the Hilbert walk numbers its grid in int32: {LARGEST_SIDE**2} tokens at most, not {n}"
        )
    if side == 1:
        return np.zeros(1, dtype=np.int32)
    half = side // 2
    row, col = _curve(half)
    cell = np.empty((4, half * half), dtype=np.int32)
    # written quarter by quarter: rows and columns of the whole square are never held
    for out, (r, c) in zip(cell, _quarters(row, col, half), strict=True):
        np.multiply(r, np.int32(side), out=out)
        out += c
    walk = cell.reshape(-1)
    return walk[walk < n] if n < side * side else walk


def hilbert_positions(
    start: int, stop: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column, (stop - start,) int64 each, of steps of the walk over a whole square.

    Evaluated step by step from the base-4 digits of its number: any part of the walk without the
    rest of it. side: a power of two.
    """
    step = np.arange(start, stop, dtype=np.int64)
    row = col = np.zeros_like(step)
    half = 1
    while half < side:
        quarter = step // half**2 % 4
        rows, cols = zip(*_quarters(row, col, half), strict=True)
        row, col = np.choose(quarter, rows), np.choose(quarter, cols)
        half *= 2
    return row, col


def _curve(side: int) -> tuple[Cells, Cells]:
    """Row and column of each step over a square, by doubling."""
    row = col = np.zeros(1, dtype=np.int32)
    half = 1
    while half < side:
        rows, cols = zip(*_quarters(row, col, half), strict=True)
        row, col = np.concatenate(rows), np.concatenate(cols)
        half *= 2
    return row, col


def _quarters(row: Ints, col: Ints, half: int) -> Iterator[tuple[Ints, Ints]]:
    """The curve over the four quarters: turned, plain, plain, turned the other way."""
    yield col, row
    yield row, col + half
    yield row + half, col + half
    yield 2 * half - 1 - col, half - 1 - row
