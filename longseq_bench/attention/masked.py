"""Exact attention under a mask: sliding windows, prefixes, documents.

The compiled kernel (native) computes any mask: a tile of queries gets the keys from its first
query's first one to its last query's last one, and the first and last key of each query. The other
kernels know all pairs, a causal triangle, and a tensor of visible pairs: see patterns/mask_tiles.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D); lse (B, Hq, N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.tiles import (
    Block,
    BlockAttention,
    ExactTiles,
    LocalShare,
    TiledBlocks,
    TileSizes,
    head_runs,
    mask_tensor,
    tile_sizes,
)
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import KVPair
from longseq_bench.distributed.shard import Positions
from longseq_bench.distributed.token_order import (
    Runs,
    TokenOrder,
    even_span,
    positions_of,
    slice_runs,
)
from longseq_bench.kernels import native
from longseq_bench.kernels.base import (
    AttentionKernel,
    InPlaceKernel,
    OutputAndLse,
    Pair,
    Queries,
    Triple,
)
from longseq_bench.kernels.exact.base import ExactKernel, OneCall
from longseq_bench.kernels.exact.spans import Native
from longseq_bench.kernels.flex_blocks import interval_mask_mod
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanKernel, SpanTask, StepMap
from longseq_bench.kernels.tiling import ALL, InPlaceTiledKernel, Piece, RowBlock
from longseq_bench.patterns.spans import masked_spans
from longseq_bench.patterns.visible_keys import VisibleKeys, mask_tiles, visible_keys


def exact_call(exact: ExactKernel, w: Workload) -> AttentionKernel:
    """Return the kernel over all tokens for any number of heads: one call, or that of a mask."""
    return OneCall(exact, w.causal) if w.mask is None else MaskedCall(exact, w)


class MaskedCall:
    """An AttentionKernel over all tokens under a mask, for any number of query heads."""

    def __init__(self, exact: ExactKernel, w: Workload) -> None:
        self._kernel = cache(
            lambda heads, kv_heads: masked_kernel(
                exact, w.model_copy(update={"heads": heads, "kv_heads": kv_heads})
            )
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and the log-sum-exp."""
        return self._kernel(q.shape[1], k.shape[1]).forward(q, k, v, keep_lse)

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        return self._kernel(queries[1].shape[1], keys[0].shape[1]).backward(queries, keys)


def masked_kernel(exact: ExactKernel, w: Workload) -> InPlaceKernel:
    """Return the kernel of a masked workload on one rank."""
    visible = visible_keys(w)
    if _computes_spans(exact, w):
        tokens = (range(w.seq_len),)
        part = HeadSpans(masked_spans(visible, tokens, tokens), range(w.heads))
        task = SpanTask([part], True, masked_steps(visible, tokens, tokens))
        return SpanAttention(native, task, (w.heads, w.seq_len))
    sizes = tile_sizes(exact.device)
    return InPlaceTiledKernel(lambda: _row_blocks(w, visible, sizes), exact)


def _computes_spans(exact: ExactKernel, w: Workload) -> bool:
    """Return True for the kernel of spans, which has one head_dim for q, k and v."""
    return isinstance(exact, Native) and w.v_head_dim == w.head_dim


def _row_blocks(w: Workload, visible: VisibleKeys, sizes: TileSizes) -> Iterator[RowBlock]:
    """Yield every row and head in one row block."""
    tokens = range(w.seq_len)
    rows = min(sizes.rows, w.seq_len)
    for heads in head_runs(w, rows, w.seq_len, sizes):
        for tiles in mask_tiles(visible, tokens, tokens, rows, sizes.chunk):
            pieces = tuple(Piece(ALL, t.keys, heads, t.causal, mask_tensor(t)) for t in tiles)
            yield RowBlock(tiles[0].rows, heads, pieces)


def visible_pairs_of(
    w: Workload, device: torch.device | str, queries: Positions | None = None
) -> Tensor:
    """Return True where a query sees a key, (queries, N).

    queries: positions; None: all of the workload, in decode those of the new tokens.
    """
    keys, visible = np.arange(w.seq_len), visible_keys(w)
    queries = np.asarray(w.queries) if queries is None else queries
    first, stop, places = (
        torch.from_numpy(ends).to(device)
        for ends in (visible.first(queries), visible.stop(queries), keys)
    )
    return (places >= first[:, None]) & (places < stop[:, None])


def mask_mod_of(
    w: Workload, device: torch.device | str, queries: Positions
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as FlexAttention takes it: a function of batch, head, query and key.

    queries: positions of the local queries, which the function numbers from 0.
    """
    visible = visible_keys(w)
    first, stop = map(torch.from_numpy, (visible.first(queries), visible.stop(queries)))
    return interval_mask_mod(first, stop, device)


def masked_steps(visible: VisibleKeys, queries: Runs, keys: Runs) -> StepMap:
    """Return the first and last key of each local query, and the position of each local key."""
    positions = positions_of(queries)
    return StepMap(
        q_at=(visible.stop(positions) - 1).astype(np.int32),
        k_at=positions_of(keys).astype(np.int32),
        q_first=visible.first(positions).astype(np.int32),
    )


def block_attention(
    w: Workload, group: Group, exact: ExactKernel, order: TokenOrder, queries: Runs, device: str
) -> BlockAttention:
    """Return the attention of local queries to blocks of keys from any rank."""
    if w.mask is not None and _computes_spans(exact, w):
        visible = visible_keys(w)
        return MaskedBlocks(group, native, visible, order, queries, w.heads)
    tiles = ExactTiles(w, group.rank, order, queries, tile_sizes(device))
    return TiledBlocks(group, exact, tiles)


@dataclass(frozen=True, eq=False)
class MaskedBlocks:
    """A BlockAttention of a mask: one call of a span kernel per block.

    order: assignment of keys to ranks.  queries: positions of the local queries.
    """

    group: Group
    kernel: SpanKernel
    visible: VisibleKeys
    order: TokenOrder
    queries: Runs
    heads: int

    def forward(self, q: Tensor, kv: KVPair, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge the block into out and lse."""
        if task := self._task(block):
            self.kernel.forward(q, *kv, out, lse, task)

    def backward(self, queries: Queries, kv: KVPair, block: Block, dq: Tensor, dkv: KVPair) -> None:
        """Add the gradients of the block to dq and dkv."""
        if task := self._task(block):
            self.kernel.backward(queries, kv, dq, dkv, range(kv[0].shape[1]), task)

    def _task(self, block: Block) -> SpanTask | None:
        """Return what local queries see of a block; None if nothing."""
        if not self.group.computes:
            return None
        first_row, queries = 0, self.queries
        if isinstance(block, LocalShare):
            rows = sum(map(len, queries))
            first_row, stop = even_span(rows, block.count, block.index)
            queries = slice_runs(queries, first_row, stop)
            keys = self.order.runs(self.group.rank)
        else:
            keys = slice_runs(self.order.runs(block.owner), block.start, block.stop)
        spans = masked_spans(self.visible, queries, keys, first_row)
        if not spans.tiles:
            return None
        k_at = positions_of(keys).astype(np.int32)
        steps = StepMap(q_at=self._own.q_at, k_at=k_at, q_first=self._own.q_first)
        return SpanTask([HeadSpans(spans, range(self.heads))], True, steps, merge=True)

    @cached_property
    def _own(self) -> StepMap:
        return masked_steps(self.visible, self.queries, ())
