"""Block layouts: the key blocks that each query block sees, in compressed rows.

There is no table of blocks by blocks: 16M tokens in blocks of 128, 16 kept per row, are 2M numbers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from longseq_bench.patterns import Ints
from longseq_bench.patterns.visible_keys import VisibleKeys


@dataclass(frozen=True)
class BlockLayout:
    """Compressed rows: row i sees key blocks indices[indptr[i]:indptr[i+1]], ascending.

    indptr (rows + 1) int64, indices (kept blocks) int32. The last block may be short. Causal rows
    have no block after their own; of their own block only the lower triangle is visible.
    No row is empty, but those of blocks before first_query: of a step of decoding, its first token.
    mask: shows some of the pairs of a block and hides others; None: `causal` says it.
    """

    seq_len: int
    block: int
    causal: bool
    indptr: Ints
    indices: NDArray[np.int32]
    mask: VisibleKeys | None = None
    first_query: int = 0

    @property
    def rows(self) -> int:
        """Number of blocks in the sequence."""
        return -(-self.seq_len // self.block)

    @property
    def row_lengths(self) -> Ints:
        """Number of key blocks of each row, (rows,)."""
        return np.diff(self.indptr)

    @property
    def block_sizes(self) -> Ints:
        """Tokens of each block, (rows,); the last may be short."""
        sizes = np.full(self.rows, self.block, dtype=np.int64)
        sizes[-1] = self.seq_len - (self.rows - 1) * self.block
        return sizes

    @cached_property
    def visible_pairs(self) -> int:
        """Visible query-key token pairs per head, of queries from first_query on."""
        if self.mask is not None:
            return int(self._masked_pairs(self.mask).sum())
        if self.first_query:
            queries = np.arange(self.first_query, self.seq_len)
            return int(self.multiplicity(queries, self.keys_seen(queries)).sum())
        sizes = self.block_sizes
        pairs = int(sizes @ np.add.reduceat(sizes[self.indices], self.indptr[:-1]))
        if self.causal:
            # rows ascend, so only their last entry can be their own block
            own = sizes[self.indices[self.indptr[1:] - 1] == np.arange(self.rows)]
            pairs -= int((own * (own - 1) // 2).sum())
        return pairs

    @property
    def block_density(self) -> float:
        """Kept blocks divided by visible blocks."""
        first, stop = visible_blocks(self.seq_len, self.block, self.causal, self.mask)
        return len(self.indices) / int((stop - first)[self.first_query // self.block :].sum())

    def partial(self, mask: VisibleKeys) -> NDArray[np.bool_]:
        """Return True for kept blocks of which the mask hides a pair, (kept blocks,)."""
        starts = np.arange(self.rows) * self.block
        ends = starts + self.block_sizes
        row = np.repeat(np.arange(self.rows), self.row_lengths)
        first, stop = mask.first(ends - 1)[row], mask.stop(starts)[row]
        is_partial: NDArray[np.bool_] = (starts[self.indices] < first) | (ends[self.indices] > stop)
        return is_partial

    def _masked_pairs(self, mask: VisibleKeys) -> Ints:
        """Return the visible pairs of each kept block, (kept blocks,)."""
        sizes = self.block_sizes
        row = np.repeat(np.arange(self.rows), self.row_lengths)
        pairs = sizes[row] * sizes[self.indices]
        partial = np.flatnonzero(self.partial(mask))
        for some in np.array_split(partial, 1 + len(partial) * self.block // 2**22):
            queries = row[some, None] * self.block + np.arange(self.block)
            inside = queries < self.seq_len
            queries = np.minimum(queries, self.seq_len - 1)
            low = self.indices[some, None].astype(np.int64) * self.block
            high = low + sizes[self.indices[some, None]]
            first, stop = np.maximum(mask.first(queries), low), np.minimum(mask.stop(queries), high)
            pairs[some] = (np.maximum(stop - first, 0) * inside).sum(1)
        return pairs

    def row(self, i: int) -> NDArray[np.int32]:
        """Return the key blocks of a row, ascending."""
        return self.indices[self.indptr[i] : self.indptr[i + 1]]

    def multiplicity(self, q_positions: Ints, k_positions: Ints) -> NDArray[np.bool_]:
        """Return True where a query sees a key, (queries, keys), from global positions, int64."""
        rows, row_of_query = np.unique(q_positions // self.block, return_inverse=True)
        blocks, block_of_key = np.unique(k_positions // self.block, return_inverse=True)
        kept = np.stack([np.isin(blocks, self.row(int(i))) for i in rows])
        visible: NDArray[np.bool_] = kept[:, block_of_key][row_of_query]
        if self.mask is not None:
            visible &= self.mask.multiplicity(q_positions, k_positions)
        elif self.causal:
            visible &= k_positions[None, :] <= q_positions[:, None]
        return visible

    def runs(self) -> list[tuple[Ints, Ints]]:
        """Return runs of keys that each query from first_query on sees, first and stop of each.

        A query with fewer runs than another one has empty ones.
        """
        queries = np.arange(self.first_query, self.seq_len)
        rows, row_of_query = np.unique(queries // self.block, return_inverse=True)
        found = [self.row(int(i)).astype(np.int64) for i in rows]
        split = [np.split(row, np.flatnonzero(np.diff(row) > 1) + 1) for row in found]
        count = max(map(len, split))
        ends = np.empty((2, count, len(rows)), dtype=np.int64)
        for i, runs in enumerate(split):
            last = runs[-1][-1] + 1
            ends[:, :, i] = last
            ends[:, : len(runs), i] = [run[0] for run in runs], [run[-1] + 1 for run in runs]
        first, stop = ends[:, :, row_of_query] * self.block
        stop = np.minimum(stop, queries + 1 if self.causal else self.seq_len)
        return [*zip(np.minimum(first, stop), stop, strict=True)]

    def keys_seen(self, q_positions: Ints) -> Ints:
        """Return the keys in blocks that a query sees, ascending; see `Attention.keys_seen`."""
        rows = [self.row(int(i)) for i in np.unique(q_positions // self.block)]
        starts = np.unique(np.concatenate(rows)).astype(np.int64) * self.block
        keys: Ints = (starts[:, None] + np.arange(self.block)).ravel()
        return keys[keys < self.seq_len]


def visible_blocks(
    seq_len: int, block: int, causal: bool, mask: VisibleKeys | None
) -> tuple[Ints, Ints]:
    """Return the first key block that a row may see, and the one after the last, (rows,) each.

    A mask shows at least one pair of every block between them.
    """
    rows = np.arange(-(-seq_len // block))
    if mask is None:
        return np.zeros_like(rows), rows + 1 if causal else np.full_like(rows, len(rows))
    last = np.minimum((rows + 1) * block, seq_len) - 1
    return mask.first(rows * block) // block, (mask.stop(last) - 1) // block + 1


# ---- placement of query blocks, and so of their keys, on ranks -----------------------------------
# node-local: consecutive rows per rank, ranks in order; a window sees neighbouring ranks. load-
# balanced: rows by descending work, back and forth over the ranks, so that work is equal.
# hierarchical: consecutive rows per node, load-balanced inside it; little traffic between nodes.

Placement = Literal["node-local", "load-balanced", "hierarchical"]
Owners = NDArray[np.int32]


def place_rows(
    placement: Placement, work: NDArray[np.int64], ranks: int, ranks_per_node: int
) -> Owners:
    """Return the rank of each row, (rows,); every rank has rows // ranks rows or one more.

    work: kept blocks of each row.  The last node may have fewer than `ranks_per_node` ranks.
    """
    rows = len(work)
    if placement == "node-local":
        return _split_evenly(rows, ranks)
    if placement == "load-balanced":
        return _deal_rows(work, ranks)
    even_owners = _split_evenly(rows, ranks)
    owners = np.empty(rows, dtype=np.int32)
    for first in range(0, ranks, ranks_per_node):
        stop = min(first + ranks_per_node, ranks)
        rows_of_node = np.flatnonzero((even_owners >= first) & (even_owners < stop))
        owners[rows_of_node] = first + _deal_rows(work[rows_of_node], stop - first)
    return owners


def _split_evenly(rows: int, ranks: int) -> Owners:
    return (np.arange(rows, dtype=np.int64) * ranks // max(rows, 1)).astype(np.int32)


def _deal_rows(work: NDArray[np.int64], ranks: int) -> Owners:
    """Give the heaviest row to rank 0, the next to rank 1, ..., then back from the last rank."""
    owners = np.empty(len(work), dtype=np.int32)
    turn, index = np.divmod(np.arange(len(work)), ranks)
    owners[np.argsort(-work, kind="stable")] = np.where(turn % 2, ranks - 1 - index, index)
    return owners
