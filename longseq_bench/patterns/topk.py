"""Layouts that keep the blocks with the highest scores of each row, for data-dependent patterns.

Scores are requested in chunks of rows, so memory is that of the kept blocks and of one chunk.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UserError
from longseq_bench.patterns.block_layout import BlockLayout, Ints, visible_blocks
from longseq_bench.patterns.blocks import check_lengths, check_sparsity, kept_counts

Scores = NDArray[np.float32]

CHUNK = 2**18
"""Scores per chunk: about 5 MB of working memory."""


def top_layout(
    scores: Callable[[int, int], Scores], seq_len: int, block: int, sparsity: float, causal: bool
) -> BlockLayout:
    """Return the layout of the highest scores, with as many blocks per row as other patterns keep.

    scores(start, stop): scores of query blocks [start, stop) against all key blocks, (stop - start,
    key blocks) float32, requested once and in order; at most CHUNK scores, or one row. Scores of
    hidden blocks are ignored.  sparsity: fraction of the visible blocks to skip, in [0, 1).
    The diagonal block is always kept. Of blocks with equal scores, the first are kept. Scores may
    be infinite.

    Raises UserError for bad lengths or sparsity, and for a score that is NaN.
    """
    check_sparsity(sparsity)
    check_lengths(seq_len, block)
    rows = -(-seq_len // block)
    counts = kept_counts(visible_blocks(seq_len, block, causal, None)[1], sparsity)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices = np.empty(indptr[-1], dtype=np.int32)
    step = max(1, CHUNK // rows)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        visible = scores(start, stop)[:, : stop if causal else rows].astype(np.float32)
        kept = _top(visible, counts[start:stop, None], start, causal)
        indices[indptr[start] : indptr[stop]] = kept
    return BlockLayout(seq_len, block, causal, indptr, indices)


def _top(scores: Scores, counts: Ints, start: int, causal: bool) -> Ints:
    """Return the kept blocks of some rows, ascending, one row after the other."""
    blocks, own = np.arange(scores.shape[1]), np.arange(start, start + len(scores))
    if causal:
        scores = np.where(blocks > own[:, None], -np.inf, scores)
    if len(bad := np.argwhere(np.isnan(scores))):
        row, key = bad[0]
        raise UserError(f"the score of query block {start + row} for key block {key} is NaN")
    # the diagonal comes before every score
    scores = np.minimum(scores, np.finfo(np.float32).max)
    scores[np.arange(len(own)), own] = np.inf
    widest = int(counts.max())
    # of equal scores the first; hidden blocks are after all visible ones
    order = np.argsort(-scores, axis=1, kind="stable")[:, :widest]
    kept = np.arange(widest) < counts
    chosen = np.where(kept, order, len(blocks))
    chosen.sort(axis=1)
    return chosen[kept]
