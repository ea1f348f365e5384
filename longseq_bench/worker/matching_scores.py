"""Inputs with which attention returns one known value for each position.

A position has a code: the bits of its number, as many as head_dim has room for, at most 16. Keys
are codes as signs, queries are the same codes times a large factor. So a query's largest score is
that of the keys with its own code; those of other codes are lower by 16 or more, and their weights
vanish. All keys of a code have the same value, hence out_i = value(code(i)) under any pattern in
which a token sees itself. With unique codes also dv_j = dO_j, summed over query heads.

Neighbours have different values, so a row that is another one's shows in every dtype, at any
length. Scores reach ±200 where head_dim is 16 or more: exp() of them overflows float32 unless the
softmax subtracts its maximum, and a limit on scores below that changes the result. Values of
another head are 8 times as large.
"""

import math

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.model import Workload
from longseq_bench.distributed.shard import Positions
from longseq_bench.worker.equal_scores import signs

Array = NDArray[np.float64]

MAX_BITS = 16
_LARGEST_SCORE = 200.0
_HEAD_SCALES = 1.0, 8.0


class MatchingScores:
    """Inputs and expected results of a workload by position."""

    def __init__(self, workload: Workload) -> None:
        self._head_dim = d = workload.head_dim
        self._v_head_dim = workload.v_head_dim
        self._bits = min(d, MAX_BITS)
        self.has_unique_codes = workload.seq_len <= 2**self._bits
        # a power of two: exact in every dtype
        self._factor = 2.0 ** round(math.log2(_LARGEST_SCORE * math.sqrt(d) / self._bits))

    def inputs(self, name: str, positions: Positions) -> Array:
        """Return rows (n, D) of q and k, (n, Dv) of v and grad_out, for a head of scale 1."""
        if name in ("v", "grad_out"):
            codes = positions % 2**self._bits
            return signs(codes, self._v_head_dim, first=self._v_head_dim * (name == "grad_out"))
        rows = np.zeros((len(positions), self._head_dim))
        rows[:, : self._bits] = 1.0 - 2.0 * (positions[:, None] >> np.arange(self._bits) & 1)
        return rows * self._factor if name == "q" else rows

    def head_scale(self, kv_head: int) -> float:
        """Return the factor of a head's values."""
        return _HEAD_SCALES[kv_head % len(_HEAD_SCALES)]
