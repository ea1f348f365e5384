"""The last rows of a sink-window layout: the blocks of a KV cache that new tokens see.

A step of decoding needs no other rows, so that none is built: a layout of all rows would have as
many lists as the cache has blocks (StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns import Ints
from longseq_bench.patterns.blocks import row_counts, window_start

PATTERN = "sink-window"


@dataclass(frozen=True)
class CacheRows:
    """Blocks that the tokens first_query ... seq_len - 1 see, as those of `make_layout` would.

    It has the attributes of a BlockLayout that an attention over layouts reads.
    """

    first_query: int
    seq_len: int
    block: int
    sparsity: float
    causal: bool
    special: int
    window: int | None

    @property
    def _visible(self) -> Ints:
        """The visible blocks of each row, from that of the first new token on."""
        rows = np.arange(-(-self.seq_len // self.block)) + 1
        return (rows if self.causal else rows * 0 + len(rows))[self.first_query // self.block :]

    @cached_property
    def row_lengths(self) -> Ints:
        """Number of key blocks of each row."""
        args = self.seq_len, self.block, self.sparsity, self.causal, self.special, self.window
        return row_counts(PATTERN, *args)[self.first_query // self.block :]

    @property
    def indices(self) -> range:
        """A number for each kept block; which blocks they are, `runs` says."""
        return range(int(self.row_lengths.sum()))

    @property
    def block_density(self) -> float:
        """Kept blocks divided by visible blocks."""
        return len(self.indices) / int(self._visible.sum())

    @cached_property
    def visible_pairs(self) -> int:
        """Query-key pairs of all new tokens per head."""
        return sum(int((stop - first).sum()) for first, stop in self.runs())

    def runs(self) -> list[tuple[Ints, Ints]]:
        """Return runs of keys that each new token sees, first and stop: sinks, then the window.

        One run if the window begins where the sinks end for every token, or there are no sinks.
        """
        first_row = self.first_query // self.block
        sinks = np.minimum(-(-self.special // self.block), self.row_lengths - 1)
        width = self.row_lengths - sinks
        row = first_row + np.arange(len(width))
        start = window_start(row, self._visible, width, sinks)
        ends = [(sinks * 0, sinks), (start, start + width)]
        if (start == sinks).all() or not sinks.any():
            ends = [(start - sinks, start + width)]
        queries = np.arange(self.first_query, self.seq_len)
        limit = queries + 1 if self.causal else self.seq_len
        runs = []
        for pair in ends:
            first, stop = (end[queries // self.block - first_row] * self.block for end in pair)
            stop = np.minimum(stop, limit)
            runs.append((np.minimum(first, stop), stop))
        return runs

    def multiplicity(self, q_positions: Ints, k_positions: Ints) -> NDArray[np.bool_]:
        """Return True where a new token sees a key, (queries, keys), from global positions."""
        seen = np.zeros((len(q_positions), len(k_positions)), dtype=np.bool_)
        # the warm-up asks for the first token, which is no new one
        at = np.maximum(q_positions - self.first_query, 0)
        for first, stop in self.runs():
            seen |= (k_positions >= first[at, None]) & (k_positions < stop[at, None])
        return seen

    def keys_seen(self, q_positions: Ints) -> Ints:
        """Return the keys that new tokens may see, ascending; see `Attention.keys_seen`."""
        at = q_positions - self.first_query
        ends = ((first[at].min(), stop[at].max()) for first, stop in self.runs())
        return np.unique(np.concatenate([np.arange(*end) for end in ends]))
