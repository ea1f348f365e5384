"""Which rank holds which query blocks, and so their keys.

node-local     runs of neighbouring rows, ranks in order: what a window sees is next door
load-balanced  rows dealt out by falling work, to and fro, so that all ranks have as much
hierarchical   nodes hold runs of rows, ranks of a node are dealt theirs: little leaves a node, and
               its ranks have as much
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Placement = Literal["node-local", "load-balanced", "hierarchical"]
Owners = NDArray[np.int32]


def place_rows(how: Placement, work: NDArray[np.int64], ranks: int, per_node: int) -> Owners:
    """The rank of each row, (rows,); every rank has rows // ranks of them or one more.

    work: kept blocks of each row.  per_node: ranks of a node; the last node may have fewer.
    """
    rows = len(work)
    if how == "node-local":
        return _runs(rows, ranks)
    if how == "load-balanced":
        return _dealt(work, ranks)
    run_of = _runs(rows, ranks)
    owners = np.empty(rows, dtype=np.int32)
    for first in range(0, ranks, per_node):
        last = min(first + per_node, ranks)
        node = np.flatnonzero((run_of >= first) & (run_of < last))
        owners[node] = first + _dealt(work[node], last - first)
    return owners


def _runs(rows: int, ranks: int) -> Owners:
    return (np.arange(rows, dtype=np.int64) * ranks // max(rows, 1)).astype(np.int32)


def _dealt(work: NDArray[np.int64], ranks: int) -> Owners:
    """The heaviest row to rank 0, the next to rank 1, ..., then back from the last rank."""
    owners = np.empty(len(work), dtype=np.int32)
    turn, at = np.divmod(np.arange(len(work)), ranks)
    owners[np.argsort(-work, kind="stable")] = np.where(turn % 2, ranks - 1 - at, at)
    return owners
