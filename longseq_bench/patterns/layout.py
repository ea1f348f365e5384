"""Block layouts: for each block of queries, the key blocks it sees, in compressed rows.

Never a table of blocks by blocks: 16M tokens at block 128 with 16 blocks a row are 2M numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longseq_bench.cost import visible_pairs as dense_pairs
from longseq_bench.errors import UserError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BlockLayout:
    """Compressed rows: row i sees key blocks indices[indptr[i]:indptr[i+1]], ascending.

    indptr (rows + 1) int64, indices (kept blocks) int32. The last block may be short. Causal rows
    hold no block after their own; inside their own block only the lower triangle is seen.
    Raises UserError where a row is empty, out of order, or sees what it must not.
    """

    seq_len: int
    block: int
    causal: bool
    indptr: Ints
    indices: NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.block < 1:
            raise UserError(
                f"a layout of {self.seq_len} tokens in blocks of {self.block} needs one of each"
            )
        counts = np.diff(self.indptr)
        if len(counts) != self.rows:
            raise UserError(f"layout has {len(counts)} rows; {self.rows} blocks need as many")
        if self.indptr[0] != 0 or self.indptr[-1] != len(self.indices):
            raise UserError(
                f"layout indptr runs from {self.indptr[0]} to {self.indptr[-1]}; "
                f"{len(self.indices)} kept blocks need 0 to {len(self.indices)}"
            )
        if len(falling := np.flatnonzero(counts < 0)):
            raise UserError(f"layout indptr falls at row {falling[0]}; it must only rise")
        if len(empty := np.flatnonzero(counts == 0)):
            raise UserError(f"layout leaves query block {empty[0]} with nothing to see")
        own = np.repeat(np.arange(self.rows), counts)
        if len(bad := np.flatnonzero((own[1:] == own[:-1]) & (np.diff(self.indices) <= 0))):
            raise UserError(f"layout row {own[bad[0]]} is not ascending and free of repeats")
        last = own if self.causal else self.rows - 1
        if len(bad := np.flatnonzero((self.indices < 0) | (self.indices > last))):
            where, key = own[bad[0]], self.indices[bad[0]]
            raise UserError(f"layout row {where} sees key block {key}, which it must not")

    @property
    def rows(self) -> int:
        return -(-self.seq_len // self.block)

    @cached_property
    def visible_pairs(self) -> int:
        """Query-key token pairs that are seen, a head, with the short tail and the diagonal."""
        sizes = np.full(self.rows, self.block, dtype=np.int64)
        sizes[-1] = self.seq_len - (self.rows - 1) * self.block
        own = np.repeat(np.arange(self.rows), np.diff(self.indptr))
        pairs = sizes[own] * sizes[self.indices]
        if self.causal:
            diagonal = own == self.indices
            pairs[diagonal] = sizes[own[diagonal]] * (sizes[own[diagonal]] + 1) // 2
        return int(pairs.sum())

    @property
    def density(self) -> float:
        """Token pairs seen over those that dense attention sees under the same causality."""
        return self.visible_pairs / dense_pairs(self.seq_len, self.causal)

    @property
    def block_density(self) -> float:
        """Blocks kept over blocks visible."""
        visible = self.rows * (self.rows + 1) // 2 if self.causal else self.rows**2
        return len(self.indices) / visible

    def row(self, i: int) -> NDArray[np.int32]:
        """Key blocks of a row, ascending."""
        return self.indices[self.indptr[i] : self.indptr[i + 1]]

    def runs(self, i: int) -> list[tuple[int, int]]:
        """Key blocks of a row as runs of neighbours [start, stop)."""
        keys = self.row(i)
        cuts = np.flatnonzero(np.diff(keys) > 1) + 1
        starts = keys[np.concatenate(([0], cuts))]
        stops = keys[np.concatenate((cuts - 1, [len(keys) - 1]))] + 1
        return [(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]

    def transpose(self) -> tuple[Ints, NDArray[np.int32]]:
        """For each key block the query blocks that see it, ascending: (indptr, indices).

        Not a BlockLayout: a key block may be seen by none, and a causal one is seen from after it.
        """
        own = np.repeat(np.arange(self.rows, dtype=np.int32), np.diff(self.indptr))
        seen_by = own[np.argsort(self.indices, kind="stable")]
        counts = np.bincount(self.indices, minlength=self.rows)
        return np.concatenate(([0], np.cumsum(counts))), seen_by

    def multiplicity(self, q_positions: Ints, k_positions: Ints) -> NDArray[np.bool_]:
        """Whether a query sees a key, (queries, keys), from global token positions, int64.

        Looks only at the rows that the queries lie in.
        """
        seen = np.zeros((len(q_positions), len(k_positions)), dtype=np.bool_)
        key_blocks, query_blocks = k_positions // self.block, q_positions // self.block
        for i in np.unique(query_blocks):
            seen[query_blocks == i] = np.isin(key_blocks, self.row(int(i)))
        if self.causal:
            seen &= k_positions[None, :] <= q_positions[:, None]
        return seen
