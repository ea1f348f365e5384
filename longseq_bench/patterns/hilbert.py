"""A walk through the sequence along the Hilbert curve.

The sequence is laid row by row on a grid whose side is the smallest power of two that holds it;
the walk follows the Hilbert curve (Hilbert 1891) over the grid, cells beyond the sequence cut out.
Neighbours on the walk are neighbours on the grid, so a run of the walk is a compact patch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def grid_side(n: int) -> int:
    """The smallest power of two whose square holds n cells."""
    side = 1
    while side * side < n:
        side *= 2
    return side


def hilbert_order(n: int) -> NDArray[np.int32]:
    """Position of each step of the walk, (n,): a permutation of range(n)."""
    side = grid_side(n)
    row = col = np.zeros(1, dtype=np.int32)
    size = np.int32(1)
    while size < side:
        # four copies of the curve so far: turned, plain, plain, turned the other way
        row, col = (
            np.concatenate((col, row, row + size, 2 * size - 1 - col)),
            np.concatenate((row, col + size, col + size, size - 1 - row)),
        )
        size = np.int32(2 * size)
    cell = row * np.int32(side) + col
    return cell[cell < n] if n < side * side else cell
