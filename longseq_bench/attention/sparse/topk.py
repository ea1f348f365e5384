"""Layouts that keep the blocks with the highest scores of each row, for data-dependent patterns.

Scores are requested in chunks of rows, so memory is that of the kept blocks and of one chunk.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from longseq_bench.core.errors import UserError
from longseq_bench.patterns import Ints
from longseq_bench.patterns.block_layout import BlockLayout, visible_blocks
from longseq_bench.patterns.blocks import check_sparsity, kept_counts

CHUNK = {"cpu": 2**18, "cuda": 2**20}
"""Scores per chunk by device: about 10 and 40 MB of working memory."""


def top_layout(
    scores: Callable[[int, int], Tensor],
    seq_len: int,
    block: int,
    sparsity: float,
    causal: bool,
    chunk: int = CHUNK["cpu"],
) -> BlockLayout:
    """Return the layout of the highest scores, with as many blocks per row as other patterns keep.

    scores(start, stop): scores of query blocks [start, stop) against all key blocks, (stop - start,
    key blocks) float32 on any device, requested once and in order; at most `chunk` scores, or one
    row. Scores of hidden blocks are ignored.  sparsity: share of visible blocks to skip, in [0, 1).
    The diagonal block is always kept. Of blocks with equal scores, the first are kept. Scores may
    be infinite.

    Raises UserError for bad lengths or sparsity, and for a score that is NaN.
    """
    layout = empty_layout(seq_len, block, sparsity, causal)
    rows, counts, indptr = layout.rows, layout.row_lengths, layout.indptr
    indices = np.empty(indptr[-1], dtype=np.int32)
    step = max(1, chunk // rows)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        visible = scores(start, stop)[:, : stop if causal else rows]
        kept = _top(visible, counts[start:stop, None], start, causal)
        indices[indptr[start] : indptr[stop]] = kept
    return replace(layout, indices=indices)


def empty_layout(seq_len: int, block: int, sparsity: float, causal: bool) -> BlockLayout:
    """Return a layout with the places of the kept blocks, and no block in them."""
    check_sparsity(sparsity)
    counts = kept_counts(visible_blocks(seq_len, block, causal, None)[1], sparsity)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    return BlockLayout(seq_len, block, causal, indptr, np.empty(0, dtype=np.int32))


def _top(scores: Tensor, counts: Ints, start: int, causal: bool) -> Ints:
    """Return the kept blocks of some rows, ascending, one row after the other."""
    rows, blocks = (torch.arange(size, device=scores.device) for size in scores.shape)
    own = rows + start
    if causal:
        scores = scores.masked_fill(blocks > own[:, None], -torch.inf)
    if (bad := scores.isnan()).any():
        row, key = bad.nonzero()[0].tolist()
        raise UserError(f"the score of query block {start + row} for key block {key} is NaN")
    # the diagonal comes before every score; -0.0 becomes 0.0
    scores = scores.clamp(max=torch.finfo(torch.float32).max) + 0.0
    scores[rows, own] = torch.inf
    widest = int(counts.max())
    # of equal scores the first; hidden blocks are after all visible ones
    ordered = torch.sort(scores, descending=True, stable=True).indices[:, :widest]
    kept = np.arange(widest) < counts
    chosen = np.where(kept, ordered.cpu().numpy(), len(blocks))
    chosen.sort(axis=1)
    return chosen[kept]
