"""Attention of tensors in the host's memory: tiles are copied to the device, results back.

A row block of queries stays on the device while its keys and values are copied tile by tile; the
next tile is copied while the current one is computed. Sums of gradients of keys come and go with
their keys, so that the host adds nothing. So the device's memory does not limit queries, keys or
the output. On a CPU tiles are views of mapped files and nothing is copied.

Shapes: as in kernels/tiling.py; q, k, v, out and the gradients are on the host.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from longseq_bench import meta_mode
from longseq_bench.kernels import host_memory, tiling
from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import ExactKernel
from longseq_bench.kernels.tiling import Piece, RowBlock, Tiling, wide

Call = tuple[slice, slice, Piece]
Tiles = list[Tensor]


class StreamedKernel:
    """An AttentionKernel over a tiling whose rows and keys are slices.

    exact: computes each piece on its device.
    """

    def __init__(self, tiling: Tiling, exact: ExactKernel) -> None:
        self._tiling, self._exact = tiling, exact
        self._copier = _TileCopier(exact.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output (B, Hq, N, D) and, if kept, the log-sum-exp (B, Hq, N)."""
        out, lse = host_memory.zeros_like(q), None
        if keep_lse:
            lse = host_memory.zeros(q.shape[:3], wide(q), self._copier.device).fill_(-math.inf)
        for block in meta_mode.limited(self._tiling()):
            at = (slice(None), block.heads, block.rows)
            rows = self._copier.copy(q[at])
            acc = torch.zeros_like(rows, dtype=wide(q))
            acc_lse = acc.new_full(acc.shape[:3], -math.inf)
            for (heads, _, piece), (k_tile, v_tile) in self._keys(block, q, (k, v)):
                queries, own, own_lse = (t[:, heads, piece.rows] for t in (rows, acc, acc_lse))
                self._exact.merge(queries, k_tile, v_tile, own, own_lse, piece.causal)
                del k_tile, v_tile
            out[at] = acc
            if lse is not None:
                lse[at] = acc_lse
        return out, lse

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k, v, given out and lse of the whole softmax."""
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq = host_memory.zeros_like(q)
        dk, dv = (host_memory.zeros_like(t, wide(t)) for t in (k, v))
        for block in meta_mode.limited(self._tiling()):
            at = (slice(None), block.heads, block.rows)
            own = [self._copier.copy(t[at]) for t in (grad_out, q, out, lse)]
            acc = torch.zeros_like(own[1], dtype=wide(q))
            for call, (k_tile, v_tile, *sums) in self._keys(block, q, (k, v, dk, dv)):
                heads, _, piece = call
                do, q_rows, o, row_lse = (t[:, heads, piece.rows] for t in own)
                dq_rows = acc[:, heads, piece.rows]
                self._exact.add_gradients(
                    (do, q_rows, o, row_lse), (k_tile, v_tile), dq_rows, (sums[0], sums[1]),
                    piece.causal,
                )  # fmt: skip
                self._copier.copy_back((dk, dv), call, sums)
                del k_tile, v_tile, sums
            dq[at] = acc
        self._copier.finish()
        return dq, _to_dtype_of(dk, k), _to_dtype_of(dv, v)

    def _keys(
        self, block: RowBlock, q: Tensor, tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Call, Tiles]]:
        """Yield the calls of a row block, each with the tiles of its keys on the device."""
        calls = meta_mode.limited(tiling.calls(block, q.shape[1] // tensors[0].shape[1]))
        yield from self._copier.copy_tiles(tensors, calls)


class _TileCopier:
    """Copies tiles to the device and back; on CUDA on a separate stream, in one order."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._is_cuda = device == "cuda"
        real = self._is_cuda and not meta_mode.is_meta()
        self._stream: Any = torch.cuda.Stream() if real else None  # type: ignore[no-untyped-call]

    def copy(self, tile: Tensor) -> Tensor:
        """Return the tile on the device."""
        if not self._is_cuda:
            return tile
        if meta_mode.is_meta():
            return tile.clone()
        copied = torch.empty(tile.shape, dtype=tile.dtype, device="cuda")
        for targets, sources in zip(copied, tile, strict=True):
            for target, source in zip(targets, sources, strict=True):
                # the rows of one head are contiguous; torch copies other layouts on the host first
                target.copy_(source, non_blocking=True)
        return copied

    def copy_tiles(
        self, tensors: Sequence[Tensor], calls: Iterable[Call]
    ) -> Iterator[tuple[Call, Tiles]]:
        """Yield each call with the tiles of its keys; no two calls may have the same keys."""
        pending: tuple[Call, Tiles] | None = None
        for call in itertools.chain(calls, [None]):
            started = (call, self._start(tensors, call)) if call else None
            if pending is not None:
                yield self._wait_for(pending)
            pending = started
            del started

    def copy_back(self, tensors: Sequence[Tensor], call: Call, tiles: Tiles) -> None:
        """Copy computed tiles back to the host, after their computation and before later tiles."""
        if not self._is_cuda or meta_mode.is_meta():
            return  # on a CPU the tiles are views
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, tile in zip(tensors, tiles, strict=True):
                target[:, call[1], call[2].keys].copy_(tile, non_blocking=True)
                tile.record_stream(self._stream)

    def finish(self) -> None:
        """Wait until everything is in the host's memory."""
        if self._stream is not None:
            self._stream.synchronize()

    def _start(self, tensors: Sequence[Tensor], call: Call) -> Tiles:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return [self.copy(t[:, call[1], call[2].keys]) for t in tensors]

    def _wait_for(self, pending: tuple[Call, Tiles]) -> tuple[Call, Tiles]:
        if self._stream is not None:
            compute_stream = torch.cuda.current_stream()
            compute_stream.wait_stream(self._stream)
            for tile in pending[1]:
                # its memory is not reused for other copies until the computation has read it
                tile.record_stream(compute_stream)
        return pending


def _to_dtype_of(total: Tensor, like: Tensor) -> Tensor:
    return total if total.dtype == like.dtype else host_memory.zeros_like(like).copy_(total)
