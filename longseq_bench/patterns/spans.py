"""Spans: tiles of queries and the runs of keys that each tile sees; the input of sparse kernels.

A step is a place in a list of tokens: the sequence, or an index that the kernel gets with the spans
(such as a walk).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.block_layout import BlockLayout


@dataclass(frozen=True, eq=False)
class Spans:
    """Tiles of queries and their runs of keys.

    Tile t has queries at steps tile_start[t] + s * tile_step for s < tile_count[t]. It sees the
    runs r = runs[t] ... runs[t + 1] - 1; run r has keys at steps start[r] + s * step[r] for
    s < count[r]. A key in two runs of a tile counts twice.

    tile_start, tile_count (tiles,), start, count, step (runs,) int32; runs (tiles + 1,) int64.
    step None: 1 for all.
    """

    tile_start: NDArray[np.int32]
    tile_count: NDArray[np.int32]
    runs: NDArray[np.int64]
    start: NDArray[np.int32]
    count: NDArray[np.int32]
    step: NDArray[np.int32] | None = None
    tile_step: int = 1

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return len(self.tile_start)


def spans_of(layout: BlockLayout) -> Spans:
    """Return the rows of a layout as tiles; each kept block is a run."""
    n, block = layout.seq_len, layout.block
    rows = np.arange(layout.rows, dtype=np.int32) * np.int32(block)
    start = layout.indices * np.int32(block)
    return Spans(rows, _counts(rows, n, block), layout.indptr, start, _counts(start, n, block))


def _counts(start: NDArray[np.int32], n: int, block: int) -> NDArray[np.int32]:
    # the last block may be short
    counts: NDArray[np.int32] = np.minimum(np.int32(n) - start, np.int32(block))
    return counts
