"""Block-sparse attention on a compressed layout: each query block to the key blocks it keeps.

Neighbouring key blocks are one strided view; scattered ones are gathered together, a bounded number
of tokens at a time, so memory is that of the kept blocks of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch

from longseq_bench.attention.base import Counts, Positions, implementation
from longseq_bench.attention.tiled import TILE_ROWS, TiledAttention
from longseq_bench.comm.group import Group
from longseq_bench.cost import Cost, attention_flops, floor_bytes
from longseq_bench.errors import UnsupportedError
from longseq_bench.kernels.tiles import ALL, Index, Piece, RowBlock
from longseq_bench.model import Workload
from longseq_bench.patterns.blocks import check_asked, make_layout
from longseq_bench.patterns.layout import BlockLayout

PatternName = Literal[
    "local-window", "dilated-sparse", "global-local", "hierarchical", "strided", "sink-window",
    "random",
]  # fmt: skip


@implementation("block-sparse")
class BlockSparse(TiledAttention):
    """Attention over the blocks of a layout."""

    summary = "each block of queries sees some blocks of keys, by a named pattern"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        pattern: Annotated[PatternName, "which blocks are kept"] = "local-window",
        sparsity: Annotated[float, "fraction of the visible blocks skipped, in [0, 1)"] = 0.9,
        block: Annotated[int, "tokens a block"] = 128,
        globals: Annotated[int, "global or sink tokens (global-local, sink-window)", 0] = 128,
        seed: Annotated[int, "draw of pattern=random", 0] = 0,
    ) -> None:
        super().__init__(workload, group)
        if group.size > 1:
            raise UnsupportedError("block-sparse over several ranks is not part of this version")
        check_asked(pattern, sparsity)
        w = workload
        special = globals if pattern in ("global-local", "sink-window") else 0
        self._make = (pattern, w.seq_len, block, sparsity, w.causal, seed, min(special, w.seq_len))
        self.asked = 1 - sparsity
        self._layout: BlockLayout | None = None

    @property
    def layout(self) -> BlockLayout:
        """Made when first needed: by `plan`, so that its time and memory are the plan's."""
        if self._layout is None:
            self._layout = make_layout(*self._make)
        return self._layout

    def plan(self, device: str) -> None:
        super().plan(device)
        self._layout = None
        _ = self.layout

    def tiles(self) -> Iterator[RowBlock]:
        for heads in self.head_runs(TILE_ROWS):
            for i in range(self.layout.rows):
                yield self._row(i, heads)

    def _row(self, i: int, heads: slice) -> RowBlock:
        layout, w = self.layout, self.workload
        rows = slice(i * layout.block, min((i + 1) * layout.block, w.seq_len))
        pieces: list[Piece] = []
        scattered: list[int] = []
        for start, stop in layout.runs(i):
            # its own block is a triangle of its own
            last = i if w.causal and stop == i + 1 else stop
            if (last - start) * layout.block >= TILE_ROWS:
                pieces.append(Piece(ALL, self._tokens(start, last), heads))
            else:
                scattered += range(start, last)
            if last < stop:
                pieces.append(Piece(ALL, rows, heads, causal=True))
        step = max(1, TILE_ROWS // layout.block)
        for at in range(0, len(scattered), step):
            keys = self._gathered(scattered[at : at + step])
            pieces.append(Piece(ALL, keys, heads))
        return RowBlock(rows, heads, tuple(pieces))

    def _tokens(self, start: int, stop: int) -> slice:
        return slice(
            start * self.layout.block, min(stop * self.layout.block, self.workload.seq_len)
        )

    def _gathered(self, blocks: list[int]) -> Index:
        """Tokens of some blocks: a view where they are neighbours."""
        if blocks[-1] - blocks[0] == len(blocks) - 1:
            return self._tokens(blocks[0], blocks[-1] + 1)
        spans = [np.arange(s.start, s.stop) for s in (self._tokens(b, b + 1) for b in blocks)]
        return torch.from_numpy(np.concatenate(spans))

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self.layout.multiplicity(q_positions, k_positions)

    def cost(self) -> Cost:
        pairs = self.layout.visible_pairs
        return Cost(attention_flops(self.workload, pairs), floor_bytes(self.workload))

    def measures(self) -> dict[str, float]:
        return {"density_asked": self.asked, "density_achieved": self.layout.block_density}

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "kept_blocks": len(self.layout.indices)}
