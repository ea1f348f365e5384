"""Layouts that keep the blocks with the highest scores of each row, for data-dependent patterns.

Scores are requested in chunks of rows, so memory is that of the kept blocks and of one chunk.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UserError
from longseq_bench.patterns.block_layout import BlockLayout, Ints
from longseq_bench.patterns.blocks import check_lengths, check_sparsity, kept_counts

Scores = NDArray[np.float32]

CHUNK = 2**18
"""Scores per chunk: about 5 MB of working memory."""

_HIDDEN = np.iinfo(np.int64).max
_FIRST = np.int64(np.iinfo(np.int32).min) << 32


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
    counts = kept_counts(rows, sparsity, causal)
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
    keys = _descending(scores, start, causal)
    widest = int(counts.max())
    if widest < keys.shape[1]:
        keys = np.partition(keys, widest - 1, axis=1)[:, :widest]
    keys.sort(axis=1)
    kept = np.arange(widest) < counts
    blocks = np.where(kept, keys & 0xFFFFFFFF, _HIDDEN)
    blocks.sort(axis=1)
    return blocks[kept]


def _descending(scores: Scores, start: int, causal: bool) -> Ints:
    """Return a sort key for each score, all different in a row; smaller keys are kept first.

    The inverted order of the score is in the high bits, the block index in the low ones. The bits
    of positive floats sort as integers; those of negative floats sort in reverse.
    """
    blocks = np.arange(scores.shape[1])
    own = np.arange(start, start + len(scores))
    hidden = blocks > own[:, None] if causal else np.zeros_like(scores, dtype=np.bool_)
    if len(bad := np.argwhere(np.isnan(scores) & ~hidden)):
        row, key = bad[0]
        raise UserError(f"the score of query block {start + row} for key block {key} is NaN")
    # adding 0 turns -0.0 into 0.0, whose bits differ
    bits = (scores + np.float32(0)).view(np.int32)
    rising = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    keys = (~rising).astype(np.int64) << 32
    keys |= blocks
    keys[hidden] = _HIDDEN
    # the diagonal sorts before every score; only NaN has such bits
    keys[np.arange(len(own)), own] = _FIRST | own
    return keys
