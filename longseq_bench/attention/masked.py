"""Exact attention under a mask: sliding windows, prefixes, documents.

On one rank the compiled kernel (native) computes any mask: a tile of queries gets the keys from its
first query's first one to its last query's last one, and the first and last key of each query. The
other kernels know all pairs, a causal triangle, and a tensor of visible pairs (`mask_tiles`).

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D); lse (B, Hq, N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.tiles import TileSizes, head_runs, mask_tensor, tile_sizes
from longseq_bench.core.model import Workload
from longseq_bench.distributed.shard import Positions
from longseq_bench.kernels import native
from longseq_bench.kernels.base import AttentionKernel, InPlaceKernel
from longseq_bench.kernels.exact.base import ExactKernel, OneCall
from longseq_bench.kernels.exact.spans import Native
from longseq_bench.kernels.flex_blocks import interval_mask_mod
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask, StepMap
from longseq_bench.kernels.tiling import ALL, InPlaceTiledKernel, Piece, RowBlock
from longseq_bench.patterns.spans import masked_spans
from longseq_bench.patterns.visible_keys import VisibleKeys, mask_tiles, visible_keys


def exact_call(exact: ExactKernel, w: Workload) -> AttentionKernel:
    """Return the kernel over all tokens: one call, or that of a mask."""
    return OneCall(exact, w.causal) if w.mask is None else masked_kernel(exact, w)


def masked_kernel(exact: ExactKernel, w: Workload) -> InPlaceKernel:
    """Return the kernel of a masked workload on one rank."""
    visible = visible_keys(w)
    # the kernel of spans has one head_dim for q, k and v
    if isinstance(exact, Native) and w.v_head_dim == w.head_dim:
        part = HeadSpans(masked_spans(visible), range(w.heads))
        task = SpanTask([part], True, masked_steps(visible))
        return SpanAttention(native, task, (w.heads, w.seq_len))
    sizes = tile_sizes(exact.device)
    return InPlaceTiledKernel(lambda: _row_blocks(w, visible, sizes), exact)


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


def masked_steps(visible: VisibleKeys, queries: Positions | None = None) -> StepMap:
    """Return the first and the last key of each query; queries: positions; None: all."""
    queries = np.arange(visible.tokens) if queries is None else queries
    last, first = visible.stop(queries) - 1, visible.first(queries)
    return StepMap(q_at=last.astype(np.int32), q_first=first.astype(np.int32))
