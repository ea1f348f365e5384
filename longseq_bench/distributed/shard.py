"""What of a trial's tensors a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.model import Workload

Positions = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows of the batch, heads, and the global positions of the tokens, each in local order.

    Ranks may hold the same part of q or of k and v; then they hold equal numbers.
    """

    batch: range
    heads: range
    kv_heads: range
    queries: Positions
    keys: Positions

    @classmethod
    def full(cls, w: Workload) -> Shard:
        """Everything."""
        positions = np.arange(w.seq_len)
        return cls(range(w.batch), range(w.heads), range(w.kv_heads), positions, positions)

    @classmethod
    def of_tokens(cls, w: Workload, positions: Positions, keys: Positions | None = None) -> Shard:
        """All heads of some tokens; the same tokens' keys where none are named."""
        keys = positions if keys is None else keys
        return cls(range(w.batch), range(w.heads), range(w.kv_heads), positions, keys)
