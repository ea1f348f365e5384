"""Block layouts: for each block of queries, the key blocks it sees, in compressed rows.

Never a table of blocks by blocks: 16M tokens at block 128 with 16 blocks a row are 2M numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longseq_bench.core.cost import visible_pairs as dense_pairs
from longseq_bench.core.errors import UserError

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
        # each row is one run of rising numbers, so its ends tell its range
        rising = self.indices[1:] > self.indices[:-1]
        rising[self.indptr[1:-1] - 1] = True
        if not rising.all():
            where = int(np.searchsorted(self.indptr, np.argmin(rising), side="right")) - 1
            raise UserError(f"layout row {where} is not ascending and free of repeats")
        lowest, highest = self.indices[self.indptr[:-1]], self.indices[self.indptr[1:] - 1]
        beyond = highest > (np.arange(self.rows) if self.causal else self.rows - 1)
        if len(bad := np.flatnonzero((lowest < 0) | beyond)):
            key = lowest[bad[0]] if lowest[bad[0]] < 0 else highest[bad[0]]
            raise UserError(f"layout row {bad[0]} sees key block {key}, which it must not")

    @property
    def rows(self) -> int:
        return -(-self.seq_len // self.block)

    @property
    def row_lengths(self) -> Ints:
        """Key blocks that each row keeps, (rows,)."""
        return np.diff(self.indptr)

    @cached_property
    def visible_pairs(self) -> int:
        """Query-key token pairs that are seen, a head, with the short tail and the diagonal.

        Counted in Python's whole numbers, which don't overflow.
        """
        last, size = self.rows - 1, self.block
        tail = self.seq_len - last * size
        short_rows = int(self.indptr[-1] - self.indptr[-2])
        short_keys = int(np.count_nonzero(self.indices == last))
        both = int(np.count_nonzero(self.row(last) == last))
        whole = len(self.indices) - short_rows - short_keys + both
        pairs = whole * size**2 + (short_rows + short_keys - 2 * both) * size * tail
        pairs += both * tail**2
        if self.causal:
            # a causal row that keeps its own block ends with it
            own = int(np.count_nonzero(self.indices[self.indptr[1:] - 1] == np.arange(self.rows)))
            pairs -= (own - both) * (size * (size - 1) // 2) + both * (tail * (tail - 1) // 2)
        return pairs

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

    def spans(self) -> tuple[Ints, NDArray[np.int32], NDArray[np.int32]]:
        """Runs of neighbouring key blocks of all rows: (indptr, starts, counts).

        indptr (rows + 1) int64; starts and counts (runs) int32. Row i sees key blocks starts[s] to
        starts[s] + counts[s] - 1 for s from indptr[i] to indptr[i + 1] - 1, in as few runs as can
        be, ascending.
        """
        cut = np.empty(len(self.indices), dtype=np.bool_)
        np.not_equal(self.indices[1:], self.indices[:-1] + 1, out=cut[1:])
        cut[self.indptr[:-1]] = True
        at = np.flatnonzero(cut)
        counts = np.diff(at, append=len(cut)).astype(np.int32)
        return np.searchsorted(at, self.indptr), self.indices[at], counts

    def transpose(self) -> tuple[Ints, NDArray[np.int32]]:
        """For each key block the query blocks that see it, ascending: (indptr, indices).

        indptr (rows + 1) int64, indices (kept blocks) int32. Not a BlockLayout: a key block may be
        seen by none, and a causal one is seen from after it.
        """
        # key and query in one number: no two are alike, so any sort will do, and the plain one of
        # whole numbers is the fastest
        pairs = self.indices.astype(np.int64) << 32
        pairs |= np.repeat(np.arange(self.rows, dtype=np.int32), self.row_lengths)
        pairs.sort()
        counts = np.bincount(self.indices, minlength=self.rows)
        return np.concatenate(([0], np.cumsum(counts))), pairs.astype(np.int32)

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
