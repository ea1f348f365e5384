"""Exact attention on one rank: one kernel call, a loop over chunks of keys, or a mask.

The compiled kernel (native) computes any mask from the first and last key of each query. The other
kernels know all pairs, a causal triangle, and a tensor of visible pairs (`mask_tiles`). A pass may
also write over its inputs.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, M, D); lse (B, Hq, N).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.attention.tiles import SIZES, TileSizes, head_runs, mask_tensor
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.token_order import Positions
from longseq_bench.kernels import native
from longseq_bench.kernels.base import (
    AttentionKernel,
    OutputAndLse,
    Pair,
    Queries,
    Triple,
    disable_autocast,
)
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.exact.native import Native
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask, StepMap
from longseq_bench.kernels.tiling import ALL, Piece, RowBlock, TiledKernel
from longseq_bench.meta_mode import refuse_limited_loops
from longseq_bench.patterns.spans import masked_spans
from longseq_bench.patterns.visible_keys import VisibleKeys, mask_tiles, visible_keys


@runtime_checkable
class InPlaceKernel(AttentionKernel, Protocol):
    """A kernel that no longer reads a row of q after it has written the row's output."""

    def forward_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, written over q."""

    def backward_recompute(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
    ) -> Triple:
        """Return the gradients of q, k and v from the inputs; inplace: dq is written over q."""


class OneCall:
    """An AttentionKernel of one call of an exact kernel: all pairs, or (causal) the triangle."""

    def __init__(self, exact: ExactKernel, causal: bool) -> None:
        self._exact, self._causal = exact, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and the log-sum-exp."""
        refuse_limited_loops()
        return self._exact.forward(q, k, v, self._causal, keep_lse=keep_lse)

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        return self._exact.backward(queries, keys, self._causal)


def exact_call(exact: ExactKernel, w: Workload) -> AttentionKernel:
    """Return the kernel over all tokens: one call, or that of a mask."""
    return OneCall(exact, w.causal) if w.mask is None else masked_kernel(exact, w)


def masked_kernel(exact: ExactKernel, w: Workload) -> InPlaceKernel:
    """Return the kernel of a masked workload on one rank."""
    visible = visible_keys(w)
    # the kernel of spans has one head_dim for q, k and v
    if isinstance(exact, Native) and w.v_head_dim == w.head_dim:
        part = HeadSpans(masked_spans(visible), range(w.heads))
        task = SpanTask([part], True, masked_steps(visible), w.scores)
        return SpanAttention(native, task, (w.heads, w.seq_len))
    sizes = SIZES[exact.device]
    return TiledKernel(lambda: _row_blocks(w, visible, sizes), exact)


def _row_blocks(w: Workload, visible: VisibleKeys, sizes: TileSizes) -> Iterator[RowBlock]:
    """Yield every row and head in one row block."""
    tokens = range(w.seq_len)
    rows = min(sizes.rows, w.seq_len)
    for heads in head_runs(w, rows, w.seq_len, sizes):
        for tiles in mask_tiles(visible, tokens, tokens, rows, sizes.chunk):
            pieces = tuple(Piece(ALL, t.keys, heads, t.causal, mask_tensor(t)) for t in tiles)
            yield RowBlock(tiles[0].rows, heads, pieces)


def single_rank_tiles(w: Workload, chunk: int | None, sizes: TileSizes) -> Iterator[RowBlock]:
    """Yield the tiles of exact attention on one rank, with at most `chunk` keys in a kernel call.

    chunk None: as many as the device is fast with.
    """
    chunk = chunk or (sizes.chunk if w.train else sizes.forward_chunk)
    rows = min(chunk, sizes.rows, w.seq_len)
    # keys are views; only their gradients take memory, a chunk at a time
    for heads in head_runs(w, min(chunk, w.seq_len) if w.train else rows, w.seq_len, sizes):
        for start in range(0, w.seq_len, rows):
            tile = slice(start, min(start + rows, w.seq_len))
            stop = start if w.causal else w.seq_len
            # for few lengths: cuDNN plans each at its first call
            group = 8 * rows if w.causal and not sizes.is_host else 1
            pieces = [Piece(ALL, keys, heads) for keys in _cuts(stop, chunk, group)]
            if w.causal:
                pieces.append(Piece(ALL, tile, heads, causal=True))
            yield RowBlock(tile, heads, tuple(pieces))


def _cuts(stop: int, chunk: int, group: int) -> Iterator[slice]:
    """Yield the keys of calls: at most `chunk`, multiples of `group` and then a rest."""
    start = 0
    while start < stop:
        size = min(chunk, stop - start)
        size = size // group * group or size
        yield slice(start, start + size)
        start += size


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


def masked_steps(visible: VisibleKeys, queries: Positions | None = None) -> StepMap:
    """Return the first and the last key of each query; queries: positions; None: all."""
    queries = np.arange(visible.tokens) if queries is None else queries
    last, first = visible.stop(queries) - 1, visible.first(queries)
    return StepMap(q_at=last.astype(np.int32), q_first=first.astype(np.int32))


# ---- passes that keep nothing, or write over q ---------------------------------------------------


def forward_inplace(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output, written over q. Not differentiable.

    Raises UnsupportedError if the kernel reads q after it writes the output, or needs a copy of it.
    """
    with torch.no_grad(), disable_autocast(q):
        return _inplace_kernel(attention, q, k, v).forward_inplace(q, k, v)


def backward_recompute(
    attention: Attention, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, inplace: bool
) -> Triple | None:
    """Return the gradients of q, k and v computed from the inputs alone.

    None means: run a forward and a backward instead. With inplace=True the gradient of q is written
    over q. Raises UnsupportedError if the kernel then reads q until the end of the pass, or needs a
    copy of a tensor.
    """
    has_sinks = attention.sinks is not None
    if not inplace and (has_sinks or not isinstance(attention.build_kernel(), InPlaceKernel)):
        return None
    with torch.no_grad(), disable_autocast(q):
        kernel = _inplace_kernel(attention, grad_out, q, k, v)
        return kernel.backward_recompute(grad_out, q, k, v, inplace)


def _inplace_kernel(attention: Attention, *tensors: Tensor) -> InPlaceKernel:
    if any(t.stride(-1) != 1 for t in tensors):
        raise UnsupportedError(
            "a pass in place makes no copies; give it tensors with a contiguous head_dim"
        )
    kernel = attention.build_kernel()
    if not isinstance(kernel, InPlaceKernel):
        raise UnsupportedError(
            "keep=nothing: not supported here, the inputs are read until the end of the pass"
        )
    return kernel
