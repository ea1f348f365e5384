"""The part of a trial's tensors that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.model import Workload

Positions = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows of the batch, heads, and global positions of tokens, each in local order.

    Several ranks may hold the same part of q, or of k and v; their values are then equal.
    """

    batch: range
    heads: range
    kv_heads: range
    queries: Positions
    keys: Positions

    @property
    def tokens(self) -> int:
        """Number of its tokens: of its queries, or of its part of a cache, which are more."""
        return max(len(self.queries), len(self.keys))

    @classmethod
    def full(cls, w: Workload) -> Shard:
        """Return a shard that holds everything."""
        every = np.arange(w.seq_len)
        return cls.of_tokens(w, every[w.queries.start :], every)

    @classmethod
    def of_tokens(cls, w: Workload, positions: Positions, keys: Positions | None = None) -> Shard:
        """Return all heads of some queries and of some keys; keys default to the same tokens."""
        keys = positions if keys is None else keys
        return cls(range(w.batch), range(w.heads), range(w.kv_heads), positions, keys)
