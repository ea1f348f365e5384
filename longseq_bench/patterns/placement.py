"""Placement of query blocks, and so of their keys, on ranks.

node-local     consecutive rows per rank, ranks in order: a window sees neighbouring ranks
load-balanced  rows by descending work, back and forth over the ranks, so that work is equal
hierarchical   consecutive rows per node, load-balanced inside it: little traffic between nodes
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Placement = Literal["node-local", "load-balanced", "hierarchical"]
Owners = NDArray[np.int32]


def place_rows(
    placement: Placement, work: NDArray[np.int64], ranks: int, ranks_per_node: int
) -> Owners:
    """Return the rank of each row, (rows,); every rank has rows // ranks rows or one more.

    work: kept blocks of each row.  The last node may have fewer than `ranks_per_node` ranks.
    """
    rows = len(work)
    if placement == "node-local":
        return _split_evenly(rows, ranks)
    if placement == "load-balanced":
        return _deal_rows(work, ranks)
    even_owners = _split_evenly(rows, ranks)
    owners = np.empty(rows, dtype=np.int32)
    for first in range(0, ranks, ranks_per_node):
        stop = min(first + ranks_per_node, ranks)
        rows_of_node = np.flatnonzero((even_owners >= first) & (even_owners < stop))
        owners[rows_of_node] = first + _deal_rows(work[rows_of_node], stop - first)
    return owners


def _split_evenly(rows: int, ranks: int) -> Owners:
    return (np.arange(rows, dtype=np.int64) * ranks // max(rows, 1)).astype(np.int32)


def _deal_rows(work: NDArray[np.int64], ranks: int) -> Owners:
    """Give the heaviest row to rank 0, the next to rank 1, ..., then back from the last rank."""
    owners = np.empty(len(work), dtype=np.int32)
    turn, index = np.divmod(np.arange(len(work)), ranks)
    owners[np.argsort(-work, kind="stable")] = np.where(turn % 2, ranks - 1 - index, index)
    return owners
