"""Assignment of tokens to ranks so that every rank has as many tokens and as many visible pairs.

The sequence is cut into equally long pieces, and every rank gets equally many of them. The pieces
with most pairs are given out first, each to the rank that has fewest pairs so far. With a causal
mask and two pieces per rank this is the zigzag of Llama 3 (arXiv 2407.21783); documents need more
pieces. MagiAttention (github.com/SandAI-org/MagiAttention) assigns tokens by the same idea.
"""

import heapq
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

Runs = tuple[range, ...]


def balanced_runs(visible: VisibleKeys, ranks: int) -> tuple[Runs, ...]:
    """Return the positions of each rank's tokens as ascending runs, with as few pieces as possible.

    visible: has at least two tokens per rank.
    """
    tokens = visible.tokens
    best: tuple[float, tuple[Runs, ...]] | None = None
    pieces = 2
    while best is None or (pieces <= MAX_PIECES and tokens // (pieces * ranks) >= MIN_PIECE):
        ends = np.arange(pieces * ranks + 1) * tokens // (pieces * ranks)
        pairs = np.diff(visible.pairs_before(ends))
        owned = _assign(pairs, ranks, pieces)
        sums = [int(pairs[own].sum()) for own in owned]
        imbalance = max(sums) * ranks / sum(sums) - 1
        if best is None or imbalance < best[0]:
            best = imbalance, tuple(_join(np.sort(own), ends) for own in owned)
        if imbalance <= MAX_IMBALANCE:
            break
        pieces *= 2
    return best[1]


def _assign(pairs: NDArray[np.int64], ranks: int, pieces: int) -> list[NDArray[np.int64]]:
    """Return the pieces of each rank, equally many."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    waiting = [(0, rank) for rank in range(ranks)]
    for piece in np.argsort(-pairs, kind="stable").tolist():
        total, rank = heapq.heappop(waiting)
        owned[rank].append(piece)
        if len(owned[rank]) < pieces:
            heapq.heappush(waiting, (total + int(pairs[piece]), rank))
    return [np.array(own) for own in owned]


def _join(pieces: NDArray[np.int64], ends: NDArray[np.int64]) -> Runs:
    """Return ascending pieces as runs; neighbours are one run."""
    cuts = np.flatnonzero(np.diff(pieces) > 1) + 1
    return tuple(
        range(int(ends[pieces[a]]), int(ends[pieces[b - 1] + 1]))
        for a, b in pairwise([0, *cuts.tolist(), len(pieces)])
    )
