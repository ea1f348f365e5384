"""What every implementation made of tiles shares: how large a tile is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch

from longseq_bench.attention.kernel_attention import KernelAttention
from longseq_bench.kernels.base import AttentionKernel, TiledKernel
from longseq_bench.kernels.tiling import ALL, Piece, RowBlock

TILE_ROWS = 1024
"""Rows a kernel call: torch's CPU kernel works in tiles of 256 rows from 768 rows up."""

SMALLEST_TILE_BYTES = 512 * 1024
TILE_SHARE_OF_Q = 16
"""Temporaries are four tiles or so: at a sixteenth of q each they stay a few percent of the floor,
and no smaller than what keeps a core's cache busy."""


class TiledAttention(KernelAttention):
    """An attention given by a plan of tiles; see kernels/tiling.py."""

    @abstractmethod
    def tiles(self) -> Iterator[RowBlock]:
        """The plan, walked afresh at every pass."""

    def build_kernel(self) -> AttentionKernel:
        return TiledKernel(self.tiles)

    def head_runs(self, rows: int) -> Iterator[slice]:
        """Runs of query heads that keep a tile of `rows` tokens small beside q."""
        w = self.workload
        group = w.heads // w.kv_heads
        row_bytes = w.batch * w.head_dim * w.dtype_bytes
        held = len(self.shard.queries)
        room = max(SMALLEST_TILE_BYTES, row_bytes * w.heads * held // TILE_SHARE_OF_Q)
        heads = max(room // (rows * row_bytes), -(-torch.get_num_threads() // w.batch))
        run = max(1, heads // group) * group
        for start in range(0, w.heads, run):
            yield slice(start, min(start + run, w.heads))

    def exact_tiles(self, chunk: int) -> Iterator[RowBlock]:
        """Every query and every key (causal: those before it), keys `chunk` tokens at a time."""
        w = self.workload
        tile = min(chunk, TILE_ROWS, w.seq_len)
        # keys are views; only their gradients take memory, a chunk at a time
        for heads in self.head_runs(min(chunk, w.seq_len) if w.train else tile):
            every = () if w.causal else _keys_before(w.seq_len, chunk, heads)
            for start in range(0, w.seq_len, tile):
                rows = slice(start, min(start + tile, w.seq_len))
                pieces = every
                if w.causal:
                    diagonal = Piece(ALL, rows, heads, causal=True)
                    pieces = (*_keys_before(start, chunk, heads), diagonal)
                yield RowBlock(rows, heads, pieces)


def _keys_before(last: int, chunk: int, heads: slice) -> tuple[Piece, ...]:
    """The first `last` keys, `chunk` of them at a time, seen by every row of a block."""
    steps = range(0, last, chunk)
    return tuple(Piece(ALL, slice(k, min(k + chunk, last)), heads) for k in steps)
