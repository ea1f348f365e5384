"""The last rows of a sink-window layout: the blocks of a KV cache that new tokens see.

A step of decoding needs no other rows, so that none is built: a layout of all rows would have as
many lists as the cache has blocks (StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns.block_layout import Ints, visible_blocks
from longseq_bench.patterns.blocks import PATTERNS, LayoutRows, row_counts

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
    def first_row(self) -> int:
        """The block of the first new token."""
        return self.first_query // self.block

    @cached_property
    def _rows(self) -> list[Ints]:
        """The ascending blocks of each row, from `first_row` on."""
        args = self.seq_len, self.block, self.sparsity, self.causal, self.special, self.window
        counts = row_counts(PATTERN, *args)[self.first_row :]
        row = np.arange(self.first_row, self.first_row + len(counts))
        rows = LayoutRows(
            row=row[:, None], visible=self._visible[:, None], kept=counts[:, None],
            slot=np.arange(int(counts.max()))[None, :], seed=0,
            special=-(-self.special // self.block), stride=0, window=1,
        )  # fmt: skip
        table = PATTERNS[PATTERN](rows)
        return [np.asarray(blocks[:n]) for blocks, n in zip(table, counts, strict=True)]

    @property
    def _visible(self) -> Ints:
        first, stop = visible_blocks(self.seq_len, self.block, self.causal, None)
        return (stop - first)[self.first_row :]

    @property
    def indices(self) -> Ints:
        """The kept blocks of all rows."""
        return np.concatenate(self._rows)

    @property
    def row_lengths(self) -> Ints:
        """Number of key blocks of each row."""
        return np.array([len(blocks) for blocks in self._rows])

    @property
    def block_density(self) -> float:
        """Kept blocks divided by visible blocks."""
        return len(self.indices) / int(self._visible.sum())

    @property
    def mask(self) -> None:
        """None: no mask of core/masks.py hides pairs."""

    @cached_property
    def visible_pairs(self) -> int:
        """Query-key pairs of all new tokens per head."""
        return sum(int((stop - first).sum()) for first, stop in self.runs())

    def runs(self) -> list[tuple[Ints, Ints]]:
        """Return runs of keys that each new token sees, first and stop: sinks, then the window.

        One run if the window begins where the sinks end for every token.
        """
        queries = np.arange(self.first_query, self.seq_len)
        of_row = [_split_runs(blocks) for blocks in self._rows]
        runs = []
        for n in range(max(map(len, of_row))):
            # a row without this run gets an empty one where that of another row begins
            begin = next(row[n][0] for row in of_row if n < len(row))
            ends = np.array([row[n] if n < len(row) else (begin, begin) for row in of_row])
            first, stop = (ends[queries // self.block - self.first_row] * self.block).T
            stop = np.minimum(stop, queries + 1 if self.causal else self.seq_len)
            first = np.minimum(first, stop)
            runs.append((first, stop))
        return runs

    def multiplicity(self, q_positions: Ints, k_positions: Ints) -> NDArray[np.bool_]:
        """Return True where a new token sees a key, (queries, keys), from global positions."""
        seen = np.zeros((len(q_positions), len(k_positions)), dtype=np.bool_)
        # the warm-up asks for the first token, which is no new one
        at = np.maximum(q_positions - self.first_query, 0)
        for first, stop in self.runs():
            in_run = (k_positions >= first[at, None]) & (k_positions < stop[at, None])
            np.logical_or(seen, in_run, out=seen)
        return seen

    def may_see(self, q_positions: Ints, k_positions: Ints) -> NDArray[np.bool_]:
        """Return True for keys that a new token sees, (keys,)."""
        may: NDArray[np.bool_] = np.any(self.multiplicity(q_positions, k_positions), axis=0)
        return may


def _split_runs(blocks: Ints) -> list[tuple[int, int]]:
    """Return the first block of each run of neighbours, and the one after its last."""
    parts = np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
