"""Tiles of exact attention, and attention of local queries to blocks of keys from any rank.

A tile is what one kernel call computes: some rows of q against some keys, all pairs of them or a
lower triangle. Results of tiles merge by log-sum-exp, so blocks of keys may come in any order
(arXiv 2310.01889).

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D); lse (B, Hq, N).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

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
from longseq_bench.meta_mode import MAX_STEPS, limited
from longseq_bench.patterns.visible_keys import MaskTile, mask_tiles, visible_keys

T = TypeVar("T")

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
    heads = max(_head_rows(w, local_rows, sizes) // rows, -(-threads // w.batch))
    run = max(1, heads // group) * group
    return [slice(start, min(start + run, w.heads)) for start in range(0, w.heads, run)]


def most_rows(w: Workload, sizes: TileSizes) -> int:
    """Return the rows on one rank of a tile with the fewest heads."""
    return max(sizes.rows, _head_rows(w, w.seq_len, sizes) // (w.heads // w.kv_heads))


def _head_rows(w: Workload, local_rows: int, sizes: TileSizes) -> int:
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

HeadTile = tuple[slice, slice, MaskTile]
"""Query heads, the KV heads that they use, and a tile."""


class BlockAttention(Protocol):
    """Attention of this rank's queries to a block of keys, merged into the results so far."""

    def forward(self, q: Tensor, kv: KVPair, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge the block into out and lse, which start as 0 and -inf, in float32 or wider."""

    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        """Add the gradients of the block to dq and dkv, in float32 or wider."""


def computed(group: Group, tiles: Iterable[T]) -> Iterable[T]:
    """Return the tiles of a block; none while communication alone is timed."""
    return limited(tiles, MAX_STEPS) if group.computes else ()


class ExactBlocks(BlockAttention):
    """BlockAttention to all keys that the mask shows; a kernel call computes a tile.

    order: assignment of keys to ranks. queries: positions of the local queries.
    """

    def __init__(
        self,
        w: Workload,
        group: Group,
        exact: ExactKernel,
        order: TokenOrder,
        queries: Runs,
        sizes: TileSizes,
    ) -> None:
        self._group, self._exact, self._order, self._queries = group, exact, order, queries
        self._mask, self._causal = None if w.mask is None else visible_keys(w), w.causal
        local_rows = sum(map(len, queries))
        self._rows = max(1, min(sizes.block_rows, local_rows))
        group_size = w.heads // w.kv_heads
        self._heads = [
            (heads, slice(heads.start // group_size, heads.stop // group_size))
            for heads in head_runs(w, self._rows, local_rows, sizes)
        ]
        # keys are views; only their gradients take memory
        self._max_keys = sizes.rows if w.train else w.seq_len

    @override
    def forward(self, q: Tensor, kv: KVPair, block: Block, out: Tensor, lse: Tensor) -> None:
        for heads, kv_heads, tile in computed(self._group, self.tiles(block)):
            rows, own_out, own_lse = (t[:, heads, tile.rows] for t in (q, out, lse))
            k, v = (t[:, kv_heads, tile.keys] for t in kv)
            self._exact.merge(rows, (k, v), (own_out, own_lse), tile.causal, mask_tensor(tile))

    @override
    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        for heads, kv_heads, tile in computed(self._group, self.tiles(block)):
            grad_out, q, out, lse, rows_dq = (t[:, heads, tile.rows] for t in (*queries, dq))
            k, v, dk, dv = (t[:, kv_heads, tile.keys] for t in (*kv, *dkv))
            rows, sums = (grad_out, q, out, lse), (rows_dq, dk, dv)
            self._exact.add_gradients(rows, (k, v), sums, tile.causal, mask_tensor(tile))

    def tiles(self, block: Block) -> Iterator[HeadTile]:
        """Yield the tiles of a block and their heads; key indices are into the block."""
        rows: Iterable[tuple[int, range]] = indexed_runs(self._queries)
        if isinstance(block, LocalShare):
            cuts = [(i + a, run[a:b]) for i, run in rows for a, b in self._row_cuts(len(run))]
            rows = cuts[slice(*even_span(len(cuts), block.count, block.index))]
            rank = self._group.rank
            block, step = KVBlock(rank, 0, sum(map(len, self._order.runs(rank)))), self._max_keys
        else:
            step = len(block)
        owned = slice_runs(self._order.runs(block.owner), block.start, block.stop)
        if self._mask is None and not self._causal:
            owned = (range(len(block)),)  # positions do not matter, so all runs are one
        places = product(rows, range(0, len(block), step), self._heads)
        for (first_row, row_run), first_key, (heads, kv_heads) in places:
            for offset, key_run in indexed_runs(slice_runs(owned, first_key, first_key + step)):
                for tile in self._visible(row_run, key_run):
                    tile_rows = _shift(tile.rows, first_row)
                    tile_keys = _shift(tile.keys, first_key + offset)
                    yield heads, kv_heads, replace(tile, rows=tile_rows, keys=tile_keys)

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


def _shift(indices: slice, by: int) -> slice:
    return slice(indices.start + by, indices.stop + by)


def mask_tensor(tile: MaskTile) -> Tensor | None:
    """Return the visible pairs of a tile as a tensor; None for all pairs or a triangle."""
    return None if tile.visible is None else torch.from_numpy(tile.visible)


def empty_softmax(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return out and lse of queries without any key: 0 and -inf, in float32 or wider.

    v: values, whose head_dim is that of the output.  dtype: that of out, if it is not wide.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype or wide)
    return out, q.new_full(q.shape[:3], -math.inf, dtype=wide)


def wide_zeros(pair: KVPair, dtype: torch.dtype | None = None) -> KVPair:
    """Return zeros of the shapes of both tensors, by default in float32 or wider, to sum in."""
    wide = dtype or torch.promote_types(pair[0].dtype, torch.float32)
    return torch.zeros_like(pair[0], dtype=wide), torch.zeros_like(pair[1], dtype=wide)
