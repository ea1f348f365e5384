"""Block-sparse attention in plain torch, for machines without a compiler.

torch's fused CPU kernel runs on batches of neighbouring rows of a layout that keep equally many
blocks. If the blocks shift with the row, as in a window, the keys are one overlapping strided view
and nothing is copied; otherwise they are gathered into memory that is reused. The triangles on the
diagonal are a separate call for all rows of a batch. Rows that fit no batch (because they see a
short last block) are computed piece by piece, and so is the whole backward (tiling.py).

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); log-sum-exp (B, Hq, N) float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.errors import UserError
from longseq_bench.kernels import tiling
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.tiling import ALL, Index, Piece, RowBlock
from longseq_bench.meta_mode import limited
from longseq_bench.patterns.block_layout import BlockLayout

ROWS_PER_CALL = 16
MIN_GATHERED_BYTES = 8 * 2**20
GATHERED_SHARE_OF_Q = 32
"""Gathered keys and values take MIN_GATHERED_BYTES or 1 / GATHERED_SHARE_OF_Q of q, if larger."""

PIECE_TOKENS = 1024
"""Keys per call when pieces are merged; longer runs are separate calls."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Rows first ... first + len(keys) - 1 of a layout, with equally many full blocks.

    keys: kept blocks (rows, blocks), without the diagonal of causal layouts.  is_window: each row's
    keys are one run, shifted by one block per row.
    """

    first: int
    keys: NDArray[np.int32]
    is_window: bool


class GatheredBlocksKernel:
    """An AttentionKernel over one layout for all heads; exact: computes the gathered pieces."""

    def __init__(self, layout: BlockLayout, exact: ExactKernel) -> None:
        self.layout, self._exact = layout, exact

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Raise UserError if the tensors are not as long as the layout."""
        self._check(q)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=tiling.wide(q)) if keep_lse else None
        max_bytes = max(MIN_GATHERED_BYTES, q.numel() * q.element_size() // GATHERED_SHARE_OF_Q)
        batches, others = self._batches
        for b in range(q.shape[0]):
            space = _Space(max_bytes, k)
            tensors = q[b], k[b], v[b]
            own_lse = None if lse is None else lse[b]
            for batch in limited(batches):
                self._batch_forward(batch, tensors, out[b], own_lse, space)
        for block in self._blocks(others, q):
            out[:, :, block.rows] = 0
            if lse is not None:
                lse[:, :, block.rows] = -math.inf
            tiling.block_forward(self._exact, q, k, v, block, out, lse)
        return out, lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k, v, given out and lse of the whole softmax."""
        q = queries[1]
        self._check(q)
        rows = np.arange(self.layout.rows)
        kernel = tiling.TiledKernel(lambda: self._blocks(rows, q), self._exact)
        return kernel.backward(queries, keys)

    def _check(self, q: Tensor) -> None:
        if q.shape[2] != self.layout.seq_len:
            raise UserError(f"q has {q.shape[2]} tokens, but the layout has {self.layout.seq_len}")

    @cached_property
    def _batches(self) -> tuple[list[_Batch], NDArray[np.int64]]:
        """Batches of rows, and the rows outside them."""
        layout = self.layout
        lengths, rows = layout.row_lengths, np.arange(layout.rows)
        last = layout.indices[layout.indptr[1:] - 1]
        short = layout.seq_len % layout.block != 0
        fits = (rows < layout.rows - 1) | (not short)
        if short and not layout.causal:
            fits &= last < layout.rows - 1
        if layout.causal:
            fits &= last == rows  # the triangle is a separate call
        batches: list[_Batch] = []
        cuts = np.flatnonzero((np.diff(lengths) != 0) | (fits[1:] != fits[:-1])) + 1
        for start, stop in zip([0, *cuts], [*cuts, layout.rows], strict=True):
            firsts = range(start, stop, ROWS_PER_CALL) if fits[start] else ()
            batches += [self._batch(i, min(i + ROWS_PER_CALL, stop)) for i in firsts]
        return batches, rows[~fits]

    def _batch(self, first: int, stop: int) -> _Batch:
        layout = self.layout
        kept = layout.indices[layout.indptr[first] : layout.indptr[stop]]
        keys = kept.reshape(stop - first, -1)
        if layout.causal:
            keys = keys[:, :-1]  # ascending, so the diagonal is last
        steps = np.arange(keys.shape[1]) + np.arange(stop - first)[:, None]
        is_window = bool(keys.size and (keys == keys[0, 0] + steps).all())
        return _Batch(first, keys, is_window)

    def _batch_forward(
        self, batch: _Batch, tensors: Triple, out: Tensor, lse: Tensor | None, space: _Space
    ) -> None:
        """Compute a batch of rows; tensors, out (H, N, D) and lse (H, N) are of one sequence."""
        q, k, v = tensors
        group, width = q.shape[0] // k.shape[0], batch.keys.shape[1] * self.layout.block
        row_bytes = 2 * max(1, width) * k.shape[2] * k.element_size()
        # heads and rows per call, so that gathered keys fit the space
        kv_step, row_step = k.shape[0], len(batch.keys)
        if not batch.is_window:
            kv_step = max(1, min(k.shape[0], space.max_bytes // row_bytes))
            row_step = max(1, space.max_bytes // (row_bytes * kv_step))
        for kv in range(0, k.shape[0], kv_step):
            kv_heads = slice(kv, min(kv + kv_step, k.shape[0]))
            heads = slice(kv_heads.start * group, kv_heads.stop * group)
            for row in range(0, len(batch.keys), row_step):
                rows = range(row, min(row + row_step, len(batch.keys)))
                tokens = self._tokens(batch.first + rows.start, batch.first + rows.stop)
                keys = k[kv_heads], v[kv_heads]
                part, part_lse = self._rows_forward(batch, rows, q[heads], keys, tokens, space)
                out[heads, tokens] = part.transpose(0, 1).flatten(1, 2)
                if lse is not None:
                    lse[heads, tokens] = part_lse.transpose(0, 1).flatten(1, 2)

    def _rows_forward(
        self, batch: _Batch, rows: range, q: Tensor, keys: Pair, tokens: slice, space: _Space
    ) -> tuple[Tensor, Tensor]:
        """Return the output (rows, Hq, block, D) and log-sum-exp of some rows of a batch.

        tokens: the tokens of the rows.
        """
        queries, own_k, own_v = (
            torch.unflatten(t[:, tokens], 1, (len(rows), self.layout.block)).transpose(0, 1)
            for t in (q, *keys)
        )
        parts: list[tuple[Tensor, Tensor]] = []
        if batch.keys.shape[1]:
            k, v = (self._keys(batch, rows, t, space, i) for i, t in enumerate(keys))
            parts.append(self._exact.forward(queries, k, v))
        if self.layout.causal:
            parts.append(self._exact.forward(queries, own_k, own_v, causal=True))
        if len(parts) == 1:
            return parts[0]
        (out, lse), (other, other_lse) = parts
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1).to(out.dtype)
        return out.lerp_(other, weight), torch.logaddexp(lse, other_lse)

    def _keys(self, batch: _Batch, rows: range, t: Tensor, space: _Space, buffer: int) -> Tensor:
        """Return the keys or values (rows, Hk, tokens, D) that some rows of a batch see."""
        block, width = self.layout.block, batch.keys.shape[1] * self.layout.block
        if batch.is_window:
            head, token, element = t.stride()
            first = t.storage_offset() + int(batch.keys[rows.start, 0]) * block * token
            size = (len(rows), t.shape[0], width, t.shape[2])
            return t.as_strided(size, (block * token, head, token, element), first)
        index = torch.from_numpy(batch.keys[rows.start : rows.stop].astype(np.int64).flatten())
        full_blocks = t[:, : t.shape[1] // block * block]
        gathered = space.gather(torch.unflatten(full_blocks, 1, (-1, block)), index, buffer)
        shape = (t.shape[0], len(rows), width, t.shape[2])
        return gathered.view(shape).transpose(0, 1)

    def _blocks(self, rows: NDArray[np.int64], q: Tensor) -> Iterator[RowBlock]:
        """Yield rows as pieces: long runs of blocks are views, the others are gathered."""
        heads = slice(0, q.shape[1])
        for i in rows.tolist():
            own = self._tokens(i, i + 1)
            pieces: list[Piece] = []
            scattered: list[int] = []
            for start, stop in self.layout.runs(i):
                end = i if self.layout.causal and stop == i + 1 else stop
                if (end - start) * self.layout.block >= PIECE_TOKENS:
                    pieces.append(Piece(ALL, self._tokens(start, end), heads))
                else:
                    scattered += range(start, end)
                if end < stop:
                    pieces.append(Piece(ALL, own, heads, causal=True))
            step = max(1, PIECE_TOKENS // self.layout.block)
            groups = (scattered[n : n + step] for n in range(0, len(scattered), step))
            pieces += [Piece(ALL, self._index(group), heads) for group in groups]
            yield RowBlock(own, heads, tuple(pieces))

    def _tokens(self, start: int, stop: int) -> slice:
        block = self.layout.block
        return slice(start * block, min(stop * block, self.layout.seq_len))

    def _index(self, blocks: list[int]) -> Index:
        if blocks[-1] - blocks[0] == len(blocks) - 1:
            return self._tokens(blocks[0], blocks[-1] + 1)
        spans = [np.arange(s.start, s.stop) for s in (self._tokens(b, b + 1) for b in blocks)]
        return torch.from_numpy(np.concatenate(spans))


class _Space:
    """Reused memory for gathered keys and values; new memory would cost page faults per call."""

    def __init__(self, max_bytes: int, like: Tensor) -> None:
        self.max_bytes = max_bytes
        self._like = like
        self._flat: dict[int, Tensor] = {}

    def gather(self, t: Tensor, index: Tensor, buffer: int) -> Tensor:
        """Return blocks of t (H, blocks, block, D) at `index`, (H, len(index), block, D)."""
        shape = (t.shape[0], len(index), *t.shape[2:])
        needed = math.prod(shape)
        if buffer not in self._flat or self._flat[buffer].numel() < needed:
            self._flat[buffer] = self._like.new_empty(needed)
        out = self._flat[buffer][:needed].view(shape)
        return torch.index_select(t, 1, index.to(t.device), out=out)
