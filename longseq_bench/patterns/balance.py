"""Tokens assigned to ranks so that all have equally many visible pairs.

The sequence is cut into equally long pieces, and every rank gets equally many of them. The pieces
with most pairs are given out first, in turns; the rank with fewest pairs so far is first. With a
causal mask and two pieces per rank this is the zigzag of Llama 3 (arXiv 2407.21783); documents need
more pieces. MagiAttention (github.com/SandAI-org/MagiAttention) has the same idea.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.visible_keys import VisibleKeys

MAX_IMBALANCE = 0.02
"""Pairs of the fullest rank above the mean at which no more pieces are tried."""

MIN_PIECE = 128
"""Tokens of a piece beyond the first two of a rank: kernels compute as many queries together."""

MAX_PIECES = 256
"""Pieces of a rank: more would cost more calls than their balance saves."""


@lru_cache(maxsize=8)
def balanced_runs(visible: VisibleKeys, ranks: int) -> tuple[tuple[range, ...], ...]:
    """Return the positions of each rank's tokens as ascending runs, with as few pieces as possible.

    visible: has at least two tokens per rank.
    """
    tokens = visible.tokens
    best: tuple[float, tuple[tuple[range, ...], ...]] | None = None
    pieces = 2
    while best is None or (pieces <= MAX_PIECES and tokens // (pieces * ranks) >= MIN_PIECE):
        ends = np.arange(pieces * ranks + 1) * tokens // (pieces * ranks)
        pairs = np.diff([visible.mask.pairs_before(end, tokens) for end in ends.tolist()])
        owners, sums = np.empty(len(pairs), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        for turn in np.argsort(-pairs, kind="stable").reshape(pieces, ranks):
            receivers = np.argsort(sums, kind="stable")
            owners[turn] = receivers
            sums[receivers] += pairs[turn]
        imbalance = float(sums.max() / sums.mean()) - 1
        if best is None or imbalance < best[0]:
            owned = (np.flatnonzero(owners == rank) for rank in range(ranks))
            best = imbalance, tuple(_join(own, ends) for own in owned)
        if imbalance <= MAX_IMBALANCE:
            break
        pieces *= 2
    return best[1]


def _join(pieces: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[range, ...]:
    """Return ascending pieces as runs; neighbours are one run."""
    cuts = np.flatnonzero(np.diff(pieces) > 1) + 1
    return tuple(
        range(int(ends[pieces[a]]), int(ends[pieces[b - 1] + 1]))
        for a, b in pairwise([0, *cuts.tolist(), len(pieces)])
    )
