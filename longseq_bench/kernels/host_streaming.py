"""Attention of tensors that lie in the host's memory: tiles come to the device, results go back.

A row block of queries stays on the device while keys and values stream past it, the next ones on
their way while the present ones are computed; so neither queries nor keys nor the output are bound
by the device's memory. On a CPU tiles are views of mapped files and nothing is copied.

Shapes: as kernels/tiling.py; q, k, v, out and the gradients on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from longseq_bench import meta_mode
from longseq_bench.kernels import host_memory, tiling, torch_fused
from longseq_bench.kernels.base import Triple
from longseq_bench.kernels.tiling import Piece, Plan, RowBlock, wide

Call = tuple[slice, slice, Piece]


class StreamedKernel:
    """An AttentionKernel over a plan of tiles whose rows and keys are slices.

    device: where it is computed.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        self._plan, self._lane = plan, _Lane(device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = host_memory.zeros_like(q), None
        if keep_lse:
            lse = host_memory.zeros(q.shape[:3], wide(q), self._lane.device).fill_(-math.inf)
        for block in meta_mode.limited(self._plan()):
            at = (slice(None), block.heads, block.rows)
            rows = self._lane.bring(q[at])
            acc = torch.zeros_like(rows, dtype=wide(q))
            acc_lse = acc.new_full(acc.shape[:3], -math.inf)
            for (heads, _, piece), (k_tile, v_tile) in self._keys(block, q, (k, v)):
                seen = rows[:, heads, piece.rows]
                part = torch_fused.forward(seen, k_tile, v_tile, piece.causal)
                tiling.join(acc, acc_lse, heads, piece.rows, *part)
                del k_tile, v_tile, part
            out[at] = acc
            if lse is not None:
                lse[at] = acc_lse
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        dq = host_memory.zeros_like(q)
        dk, dv = (host_memory.zeros_like(t, wide(t)) for t in (k, v))
        for block in meta_mode.limited(self._plan()):
            at = (slice(None), block.heads, block.rows)
            own = [self._lane.bring(t[at]) for t in (grad_out, q, out, lse)]
            acc = torch.zeros_like(own[1], dtype=wide(q))
            for (heads, kv_heads, piece), pair in self._keys(block, q, (k, v)):
                do, q_rows, o, row_lse = (t[:, heads, piece.rows] for t in own)
                parts = torch_fused.backward(do, q_rows, *pair, o, row_lse, piece.causal)
                acc[:, heads, piece.rows] += parts[0]
                for total, part in zip((dk, dv), parts[1:], strict=True):
                    total[:, kv_heads, piece.keys] += part.to(total.device, total.dtype)
                del pair, parts
            dq[at] = acc
        return dq, _narrowed(dk, k), _narrowed(dv, v)

    def _keys(
        self, block: RowBlock, q: Tensor, keys: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Call, tuple[Tensor, Tensor]]]:
        calls = meta_mode.limited(tiling.calls(block, q.shape[1] // keys[0].shape[1]))
        yield from self._lane.pairs(keys, calls)


class _Lane:
    """Brings tiles to the device; on CUDA the next pair on a stream of its own."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._copies = device == "cuda"
        real = self._copies and not meta_mode.is_meta()
        self._side: Any = torch.cuda.Stream() if real else None  # type: ignore[no-untyped-call]

    def bring(self, tile: Tensor) -> Tensor:
        """The tile on the device."""
        if not self._copies:
            return tile
        if meta_mode.is_meta():
            return tile.clone()
        made = torch.empty(tile.shape, dtype=tile.dtype, device="cuda")
        for batch, heads in zip(made, tile, strict=True):
            for there, here in zip(batch, heads, strict=True):
                # of one head rows lie together: anything else would go by way of a copy on the host
                there.copy_(here, non_blocking=True)
        return made

    def pairs(
        self, keys: tuple[Tensor, Tensor], calls: Iterable[Call]
    ) -> Iterator[tuple[Call, tuple[Tensor, Tensor]]]:
        """Keys and values of each call in turn."""
        coming: tuple[Call, tuple[Tensor, Tensor]] | None = None
        for call in calls:
            started = call, self._start(keys, call)
            if coming is not None:
                yield self._arrived(coming)
            coming = started
            del started
        if coming is not None:
            yield self._arrived(coming)

    def _start(self, keys: tuple[Tensor, Tensor], call: Call) -> tuple[Tensor, Tensor]:
        views = (t[:, call[1], call[2].keys] for t in keys)
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            first, second = (self.bring(t) for t in views)
        return first, second

    def _arrived(
        self, coming: tuple[Call, tuple[Tensor, Tensor]]
    ) -> tuple[Call, tuple[Tensor, Tensor]]:
        if self._side is not None:
            now = torch.cuda.current_stream()
            now.wait_stream(self._side)
            for tile in coming[1]:
                # its memory must not go to another copy before what reads it is done
                tile.record_stream(now)
        return coming


def _narrowed(total: Tensor, like: Tensor) -> Tensor:
    return total if total.dtype == like.dtype else host_memory.zeros_like(like).copy_(total)
