"""Tiles of exact attention, and attention of local queries to blocks of keys from any rank.

A tile is what one kernel call computes: some rows of q against some keys, all pairs of them or a
lower triangle. Results of tiles merge by log-sum-exp, so blocks of keys may come in any order
(arXiv 2310.01889).

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D); lse (B, Hq, N).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product

import torch
from torch import Tensor

from longseq_bench.core.cost import LSE_BYTES
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import KVBlock, KVPair
from longseq_bench.distributed.token_order import (
    Runs,
    TokenOrder,
    causal_tiles,
    even_span,
    indexed_runs,
    slice_runs,
)
from longseq_bench.kernels.base import Pair, Queries
from longseq_bench.kernels.exact._cuda import MAX_INDEX
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.tiling import Call, Piece, add_gradients, calls, merge, wide
from longseq_bench.meta_mode import MAX_STEPS, limited
from longseq_bench.patterns.visible_keys import MaskTile, mask_tiles, visible_keys

TILE_SHARE_OF_Q = 16
"""About four temporaries have the size of a tile. With 1/16 of q each they are a few percent of the
floor."""


@dataclass(frozen=True)
class TileSizes:
    """Sizes of tiles for a kind of device.

    rows: of a kernel call. block_rows: of one with a (short) block of keys from any rank. chunk:
    keys of a call on one rank; forward_chunk: without gradients, whose keys are views only.
    largest_block, smallest_block: keys of a block of a ring, at most and at least. min_bytes: of a
    tile's temporary, because smaller tiles would be slower. is_host: a call needs a head for each
    of its threads.
    """

    rows: int
    block_rows: int
    chunk: int
    largest_block: int
    smallest_block: int
    min_bytes: int
    forward_chunk: int
    is_host: bool = True


SIZES = {
    # torch's kernel works in tiles of 256 rows from 768 rows up; more rows pack keys less often
    "cpu": TileSizes(1024, 2048, 4096, 4096, 256, 512 * 1024, 4096),
    # as large as temporaries allow: the CPU takes 0.05 to 0.1 ms to start a call of any size.
    # Estimates, not measured: 16k queries with 16k keys take 3 ms on an H100 at 8 heads of 128
    "cuda": TileSizes(2**15, 2**16, 2**16, 2**14, 2**14, 2**26, forward_chunk=2**20, is_host=False),
}


def head_runs(w: Workload, rows: int, local_rows: int, sizes: TileSizes) -> list[slice]:
    """Return runs of query heads whose tiles of `rows` tokens are small relative to local q."""
    group = w.heads // w.kv_heads
    threads = torch.get_num_threads() if sizes.is_host else 1
    heads = max(head_rows(w, local_rows, sizes) // rows, -(-threads // w.batch))
    run = max(1, heads // group) * group
    return [slice(start, min(start + run, w.heads)) for start in range(0, w.heads, run)]


def whole_runs(w: Workload, sizes: TileSizes) -> list[slice]:
    """Return the query heads of calls with all tokens on a GPU; none if tiles need less memory.

    A call for all heads returns the results of the pass. It has the log-sum-exp of all rows, in a
    backward wide sums of the size of q; that of a tile has these and three results. A backward in
    tiles has wide gradients of all keys, a call for some heads up to eight times their q.
    """
    rows, is_half, has_groups = w.heads * w.seq_len, w.dtype_bytes == 2, w.heads > w.kv_heads
    runs = head_runs(w, w.seq_len, w.seq_len, sizes)
    is_one = LSE_BYTES * w.seq_len <= sizes.rows * w.head_dim * w.dtype_bytes
    if w.train:
        is_one = is_half and 2 * rows <= 5 * head_rows(w, w.seq_len, sizes)
    # kernels copy grouped keys, and values of another head_dim
    if is_one and not has_groups:
        runs = [slice(0, w.heads)]
    elif not (w.train and is_half and 8 * runs[0].stop <= 3 * w.kv_heads):
        return []
    can_index = w.batch * runs[0].stop * w.seq_len * w.head_dim <= MAX_INDEX
    return runs if can_index and w.head_dim == w.v_head_dim and not sizes.is_host else []


def head_rows(w: Workload, local_rows: int, sizes: TileSizes) -> int:
    """Return the rows of a tile with one head."""
    smallest = sizes.min_bytes // (w.batch * w.head_dim * w.dtype_bytes)
    return max(smallest, w.heads * local_rows // TILE_SHARE_OF_Q)


@dataclass(frozen=True)
class LocalShare:
    """A share of the work with the rank's own keys: number `index` of `count` shares of its rows.

    The work is split so that there is always something to compute while a block arrives.
    """

    index: int
    count: int


Block = KVBlock | LocalShare
"""A block of another rank, or a share of the work with the rank's own keys."""


@dataclass(frozen=True)
class BlockAttention:
    """Attention of this rank's queries to blocks of keys, one after the other.

    pieces: of a block; keys are indices into it.
    """

    group: Group
    exact: ExactKernel
    pieces: Callable[[Block], Iterable[Piece]]

    def forward(self, q: Tensor, v: Tensor, visits: Iterable[tuple[Block, KVPair]]) -> Pair:
        """Return output and log-sum-exp over blocks and their keys; v: values of that head_dim."""
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide(q))
        lse = q.new_full(q.shape[:3], -math.inf, dtype=wide(q))
        for block, kv in visits:
            merge(self.exact, q, kv, [out, lse], self._calls(q, kv, block))
        return out.to(q.dtype), lse

    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        """Add the gradients of the block to dq and dkv, in float32 or wider."""
        add_gradients(self.exact, queries, kv, [dq, *dkv], self._calls(dq, kv, block))

    def _calls(self, q: Tensor, kv: KVPair, block: Block) -> Iterable[Call]:
        """Return the calls for a block; none while communication alone is timed."""
        return calls(self.pieces(block), q, kv[0]) if self.group.computes else ()


class ExactPieces:
    """Pieces of exact attention to a block: all keys that the mask shows.

    order: assignment of keys to ranks. queries: positions of the local queries.
    """

    def __init__(
        self, w: Workload, rank: int, order: TokenOrder, queries: Runs, sizes: TileSizes
    ) -> None:
        self._rank, self._order, self._queries = rank, order, queries
        self._mask, self._causal = None if w.mask is None else visible_keys(w), w.causal
        local_rows = sum(map(len, queries))
        self._rows = max(1, min(sizes.block_rows, local_rows))
        self._heads = head_runs(w, self._rows, local_rows, sizes)
        # keys are views; only their gradients take memory
        self._max_keys = sizes.rows if w.train else w.seq_len

    def __call__(self, block: Block) -> Iterator[Piece]:
        """Yield the pieces of a block."""
        rows: Iterable[tuple[int, range]] = indexed_runs(self._queries)
        if isinstance(block, LocalShare):
            cuts = [(i + a, run[a:b]) for i, run in rows for a, b in self._row_cuts(len(run))]
            rows = cuts[slice(*even_span(len(cuts), block.count, block.index))]
            own_keys = sum(map(len, self._order.runs(self._rank)))
            block, step = KVBlock(self._rank, 0, own_keys), self._max_keys
        else:
            step = len(block)
        owned = slice_runs(self._order.runs(block.owner), block.start, block.stop)
        if self._mask is None and not self._causal:
            owned = (range(len(block)),)  # positions do not matter, so all runs are one
        places = limited(product(rows, range(0, len(block), step), self._heads), MAX_STEPS)
        for (first_row, row_run), first_key, heads in places:
            for offset, key_run in indexed_runs(slice_runs(owned, first_key, first_key + step)):
                for tile in self._visible(row_run, key_run):
                    by = (first_row, tile.rows), (first_key + offset, tile.keys)
                    own, seen = (slice(n + indices.start, n + indices.stop) for n, indices in by)
                    yield Piece(own, seen, heads, tile.causal, mask_tensor(tile))

    def _visible(self, rows: range, keys: range) -> Iterator[MaskTile]:
        """Yield the tiles of queries at positions `rows` with keys at positions `keys`."""
        if self._mask is not None:
            yield from chain.from_iterable(
                mask_tiles(self._mask, rows, keys, self._rows, self._max_keys)
            )
            return
        every_pair = MaskTile(slice(0, len(rows)), slice(0, len(keys)))
        for tile in causal_tiles(rows, keys) if self._causal else (every_pair,):
            start, count = tile.rows.start, tile.rows.stop - tile.rows.start
            for a, b in [(0, count)] if tile.causal else self._row_cuts(count):
                yield replace(tile, rows=slice(start + a, start + b))

    def _row_cuts(self, count: int) -> list[tuple[int, int]]:
        """Cut rows for kernel calls: evenly, because kernels are slower on short runs."""
        parts = max(1, count // self._rows)
        return [even_span(count, parts, part) for part in range(parts)]


def mask_tensor(tile: MaskTile) -> Tensor | None:
    """Return the visible pairs of a tile as a tensor; None for all pairs or a triangle."""
    return None if tile.visible is None else torch.from_numpy(tile.visible)


def wide_zeros(pair: KVPair) -> KVPair:
    """Return zeros of the shapes of both tensors, in float32 or wider, to sum in."""
    dtype = wide(pair[0])
    return torch.zeros_like(pair[0], dtype=dtype), torch.zeros_like(pair[1], dtype=dtype)
