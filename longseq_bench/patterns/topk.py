"""The layout that keeps the highest scores of each row: what a pattern that looks at data needs.

Scores come a chunk of rows at a time, so memory is that of the kept blocks and of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.errors import UserError
from longseq_bench.patterns.block_layout import BlockLayout, Ints
from longseq_bench.patterns.blocks import check_lengths, check_sparsity, kept_counts

Scores = NDArray[np.float32]

CHUNK = 2**18
"""Scores asked for at a time: some five megabytes in all."""

_HIDDEN = np.iinfo(np.int64).max
_FIRST = np.int64(np.iinfo(np.int32).min) << 32


def top_layout(
    scores: Callable[[int, int], Scores], seq_len: int, block: int, sparsity: float, causal: bool
) -> BlockLayout:
    """The blocks with the highest scores, as many a row as every pattern keeps at this sparsity.

    scores(start, stop): those of query blocks [start, stop) against all key blocks, (stop - start,
    key blocks) float32, asked for once and in order; at most CHUNK of them, or one row. What is not
    visible is not looked at.  sparsity: fraction of the visible blocks to skip, in [0, 1).
    The diagonal block is always kept; of equal scores the lower block is. Infinite scores are
    scores.
    Raises UserError for bad lengths or sparsity, and for scores of another shape or that are NaN.
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
        given = np.asarray(scores(start, stop))
        if given.shape != (stop - start, rows):
            raise UserError(
                f"scores of query blocks {start} to {stop - 1} have shape {given.shape}; "
                f"{(stop - start, rows)} is theirs"
            )
        seen = given[:, : stop if causal else rows].astype(np.float32)
        indices[indptr[start] : indptr[stop]] = _top(seen, counts[start:stop, None], start, causal)
    return BlockLayout(seq_len, block, causal, indptr, indices)


def _top(scores: Scores, counts: Ints, start: int, causal: bool) -> Ints:
    """The kept blocks of some rows, ascending, one row after the other."""
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
    """A number for each score: the smaller, the sooner it is kept, and no two of a row alike.

    The score's order, turned round, stands above the block's number. The bits of floats are in
    order as whole numbers are, but for the negative ones, which are in the opposite order.
    """
    blocks = np.arange(scores.shape[1])
    own = np.arange(start, start + len(scores))
    hidden = blocks > own[:, None] if causal else np.zeros_like(scores, dtype=np.bool_)
    if len(bad := np.argwhere(np.isnan(scores) & ~hidden)):
        row, key = bad[0]
        raise UserError(f"the score of query block {start + row} for key block {key} is NaN")
    # -0.0 and 0.0 are equal, and only their bits differ
    bits = (scores + np.float32(0)).view(np.int32)
    rising = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    keys = (~rising).astype(np.int64) << 32
    keys |= blocks
    keys[hidden] = _HIDDEN
    # below every score: NaN alone has bits so far out
    keys[np.arange(len(own)), own] = _FIRST | own
    return keys
