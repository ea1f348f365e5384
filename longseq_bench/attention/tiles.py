"""Tiles of exact attention, and attention of local queries to blocks of keys from any rank.

A tile (kernels/tiling.py) is what one kernel call computes: some rows of q against some keys, all
pairs of them or a lower triangle. Results of tiles merge by log-sum-exp, so blocks of keys may come
in any order (arXiv 2310.01889).

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D); lse (B, Hq, N).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

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
from longseq_bench.kernels.base import Queries
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.tiling import ALL, Piece, RowBlock
from longseq_bench.meta_mode import MAX_STEPS, limited
from longseq_bench.patterns.visible_keys import MaskTile, mask_tiles, visible_keys

TILE_ROWS = 1024
"""Rows of a kernel call. torch's CPU kernel works in tiles of 256 rows from 768 rows up."""

RING_TILE_ROWS = 2048
"""Rows of a kernel call with a (short) block of keys; more rows pack its keys less often."""

MIN_TILE_BYTES = 512 * 1024
TILE_SHARE_OF_Q = 16
"""About four temporaries have the size of a tile. With 1/16 of q each they are a few percent of the
floor. They have at least MIN_TILE_BYTES, because smaller tiles would be slower."""


@dataclass(frozen=True)
class TileSizes:
    """Sizes of tiles for a kind of device.

    rows: of a kernel call. block_rows: of one with a block of keys from any rank. chunk: keys of a
    call on one rank. largest_block, smallest_block: keys of a block of a ring, at most and at least
    (None: ring_blocks chooses the least). min_bytes: of a tile's temporary.
    """

    rows: int
    block_rows: int
    chunk: int
    largest_block: int
    smallest_block: int | None
    min_bytes: int


_CUDA = TileSizes(32 * 1024, 64 * 1024, 64 * 1024, 16 * 1024, 16 * 1024, 64 * 1024**2)
"""Estimates, not measured: a call of 16k queries with 16k keys takes about 3 ms on an H100 at 8
heads of 128, and the CPU takes 0.05 to 0.1 ms to start it."""


def tile_sizes(device: str) -> TileSizes:
    """Return the sizes for a kind of device.

    On a GPU a tile is as large as its temporaries allow: the time to start a call does not depend
    on its size.
    """
    if device == "cuda":
        return _CUDA
    return TileSizes(TILE_ROWS, RING_TILE_ROWS, 4 * TILE_ROWS, 4 * TILE_ROWS, None, MIN_TILE_BYTES)


def head_runs(w: Workload, rows: int, local_rows: int, sizes: TileSizes) -> list[slice]:
    """Return runs of query heads whose tiles of `rows` tokens are small relative to local q."""
    group = w.heads // w.kv_heads
    row_bytes = w.batch * w.head_dim * w.dtype_bytes
    tile_bytes = max(sizes.min_bytes, row_bytes * w.heads * local_rows // TILE_SHARE_OF_Q)
    heads = max(tile_bytes // (rows * row_bytes), -(-torch.get_num_threads() // w.batch))
    run = max(1, heads // group) * group
    return [slice(start, min(start + run, w.heads)) for start in range(0, w.heads, run)]


def single_rank_tiles(w: Workload, chunk: int | None, sizes: TileSizes) -> Iterator[RowBlock]:
    """Yield the tiles of exact attention on one rank, with at most `chunk` keys in a kernel call.

    chunk None: as many as the device is fast with.
    """
    chunk = chunk or sizes.chunk
    rows = min(chunk, sizes.rows, w.seq_len)
    # keys are views; only their gradients take memory, a chunk at a time
    for heads in head_runs(w, min(chunk, w.seq_len) if w.train else rows, w.seq_len, sizes):
        all_keys = () if w.causal else _key_chunks(w.seq_len, chunk, heads)
        for start in range(0, w.seq_len, rows):
            tile = slice(start, min(start + rows, w.seq_len))
            pieces = all_keys
            if w.causal:
                diagonal = Piece(ALL, tile, heads, causal=True)
                pieces = (*_key_chunks(start, chunk, heads), diagonal)
            yield RowBlock(tile, heads, pieces)


def _key_chunks(stop: int, chunk: int, heads: slice) -> tuple[Piece, ...]:
    """Return the keys before `stop` in chunks; every row of a block sees them."""
    starts = range(0, stop, chunk)
    return tuple(Piece(ALL, slice(k, min(k + chunk, stop)), heads) for k in starts)


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
class TiledBlocks:
    """Attention of this rank's queries to a block of keys, merged into the results so far.

    exact: computes the tiles.  tiles: returns the tiles of local queries that see a block, each of
    one piece; key indices are into the block.
    """

    group: Group
    exact: ExactKernel
    tiles: Callable[[Block], Iterable[RowBlock]]

    def forward(self, q: Tensor, kv: KVPair, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge the block into out and lse, which start as 0 and -inf, in float32 or wider."""
        for tile in self.visible(block):
            heads, kv_heads, (piece,) = tile.heads, key_heads(tile.heads, q, kv), tile.pieces
            own, own_out, own_lse = (t[:, heads, tile.rows] for t in (q, out, lse))
            k, v = (t[:, kv_heads, piece.keys] for t in kv)
            self.exact.merge(own, k, v, own_out, own_lse, piece.causal, piece.mask)

    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        """Add the gradients of the block to dq and dkv, in float32 or wider."""
        for tile in self.visible(block):
            heads, kv_heads, (piece,) = tile.heads, key_heads(tile.heads, dq, kv), tile.pieces
            grad_out, q, out, lse, dq_rows = (t[:, heads, tile.rows] for t in (*queries, dq))
            k, v, dk, dv = (t[:, kv_heads, piece.keys] for t in (*kv, *dkv))
            own = grad_out, q, out, lse
            self.exact.add_gradients(own, (k, v), dq_rows, (dk, dv), piece.causal, piece.mask)

    def visible(self, block: Block) -> Iterable[RowBlock]:
        """Return the tiles of a block; none while communication alone is timed."""
        return limited(self.tiles(block), MAX_STEPS) if self.group.computes else ()


def key_heads(heads: slice, q: Tensor, kv: KVPair) -> slice:
    """Return the KV heads of whole groups of query heads."""
    group = q.shape[1] // kv[0].shape[1]
    return slice(heads.start // group, heads.stop // group)


class ExactTiles:
    """Tiles of local queries that see a block of keys: all pairs, or the causal ones.

    order: assignment of keys to ranks. queries: positions of the local queries.
    """

    def __init__(
        self, w: Workload, rank: int, order: TokenOrder, queries: Runs, sizes: TileSizes
    ) -> None:
        self._order, self._queries, self._causal = order, queries, w.causal
        self._mask = None if w.mask is None else visible_keys(w)
        self._own_keys = order.runs(rank)
        local_rows = sum(map(len, queries))
        self._rows = max(1, min(sizes.block_rows, local_rows))
        self._head_runs = head_runs(w, self._rows, local_rows, sizes)
        # keys are views; only their gradients take memory
        self._max_keys = sizes.rows if w.train else w.seq_len

    def __call__(self, block: Block) -> Iterator[RowBlock]:
        """Yield the tiles of a block."""
        if isinstance(block, LocalShare):
            yield from self._local(block)
            return
        keys = slice_runs(self._order.runs(block.owner), block.start, block.stop)
        for heads in self._head_runs:
            for first_row, rows in indexed_runs(self._queries):
                yield from self._tiles(first_row, rows, keys, 0, heads)

    def _local(self, share: LocalShare) -> Iterator[RowBlock]:
        """Yield tiles of a share of the rows with all of the rank's own keys."""
        tiles = [
            (first_row + start, run[start:stop])
            for first_row, run in indexed_runs(self._queries)
            for start, stop in self._row_cuts(len(run))
        ]
        for first_row, rows in tiles[slice(*even_span(len(tiles), share.count, share.index))]:
            for first_key in range(0, sum(map(len, self._own_keys)), self._max_keys):
                keys = slice_runs(self._own_keys, first_key, first_key + self._max_keys)
                for heads in self._head_runs:
                    yield from self._tiles(first_row, rows, keys, first_key, heads)

    def _row_cuts(self, count: int) -> list[tuple[int, int]]:
        """Cut rows for kernel calls: evenly, because kernels are slower on short runs."""
        parts = max(1, count // self._rows)
        return [even_span(count, parts, part) for part in range(parts)]

    def _tiles(
        self, first_row: int, rows: range, keys: Runs, first_key: int, heads: slice
    ) -> Iterator[RowBlock]:
        """Yield tiles of queries at positions `rows` with keys at positions `keys`.

        first_row, first_key: their indices in q and in the tensor of keys.
        """
        for tile in self._visible(rows, keys, first_key):
            piece = Piece(ALL, tile.keys, heads, tile.causal, mask_tensor(tile))
            offset, count = first_row + tile.rows.start, tile.rows.stop - tile.rows.start
            is_whole = tile.causal or self._mask is not None
            for start, stop in [(0, count)] if is_whole else self._row_cuts(count):
                yield RowBlock(slice(offset + start, offset + stop), heads, (piece,))

    def _visible(self, rows: range, keys: Runs, first_key: int) -> Iterator[MaskTile]:
        if self._mask is None and not self._causal:
            every_key = slice(first_key, first_key + sum(map(len, keys)))
            yield MaskTile(slice(0, len(rows)), every_key)
            return
        for first, run in indexed_runs(keys):
            if self._mask is None:
                tiles: Iterable[MaskTile] = causal_tiles(rows, run)
            else:
                masked = mask_tiles(self._mask, rows, run, self._rows, self._max_keys)
                tiles = chain.from_iterable(masked)
            start = first_key + first
            for tile in tiles:
                yield replace(tile, keys=slice(start + tile.keys.start, start + tile.keys.stop))


def mask_tensor(tile: MaskTile) -> Tensor | None:
    """Return the visible pairs of a tile as a tensor; None for all pairs or a triangle."""
    return None if tile.visible is None else torch.from_numpy(tile.visible)


def empty_softmax(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of queries without any key: 0 and -inf, in float32 or wider.

    v: values, whose head_dim is that of the output.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
    return out, out.new_full(q.shape[:3], -math.inf)


def wide_zeros(pair: KVPair) -> KVPair:
    """Return zeros of the shapes of both tensors, in float32 or wider, to sum in."""
    wide = torch.promote_types(pair[0].dtype, torch.float32)
    return torch.zeros_like(pair[0], dtype=wide), torch.zeros_like(pair[1], dtype=wide)
