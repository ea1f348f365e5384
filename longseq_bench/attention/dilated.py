"""LongNet's dilated attention (arXiv 2307.02486): segments, each thinned by its rate.

Pairs (segment, rate) are mixed by their softmax denominators, which is one softmax over the
multiset union of what they see. With `mix=groups` each head uses one pair only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from longseq_bench.attention.base import Counts, Positions, implementation
from longseq_bench.attention.segments import Pair, Walk, segment_tiles
from longseq_bench.attention.tiled import TILE_ROWS, TiledAttention
from longseq_bench.comm.group import Group
from longseq_bench.cost import Cost, attention_flops, floor_bytes, visible_pairs
from longseq_bench.errors import UnsupportedError
from longseq_bench.kernels.tiles import RowBlock
from longseq_bench.model import Workload
from longseq_bench.patterns.dilated import Rule

Mix = Literal["softmax", "groups"]
SEGMENTS = (1024, 2048)
DILATION = (1, 2)


@implementation("dilated")
class Dilated(TiledAttention):
    """Segments and dilation along the sequence."""

    summary = "LongNet: segments thinned by a rate, mixed by their softmax denominators"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        segments: Annotated[tuple[int, ...], "tokens a segment, one a pair"] = SEGMENTS,
        dilation: Annotated[tuple[int, ...], "rate of each pair"] = DILATION,
        mix: Annotated[Mix, "softmax: all pairs for every head; groups: one pair each"] = "softmax",
    ) -> None:
        super().__init__(workload, group)
        if group.size > 1:
            raise UnsupportedError("segments over several ranks are not part of this version")
        self.rule = Rule(tuple(segments), tuple(dilation), workload.heads, mix)
        self.walk = Walk(workload.seq_len)
        self.step_of: NDArray[np.int32] | None = None

    def tiles(self) -> Iterator[RowBlock]:
        w = self.workload
        pairs = tuple(Pair(*pair) for pair in self.rule.pairs())
        rows = min(max(TILE_ROWS, *self.rule.segments), w.seq_len)
        for heads in self.head_runs(rows):
            yield from segment_tiles(self.walk, pairs, heads, w.causal, TILE_ROWS)

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        causal = self.workload.causal
        return self.rule.multiplicity(q_positions, k_positions, head, causal, self.step_of)

    def cost(self) -> Cost:
        return Cost(
            attention_flops(self.workload, self._pairs_a_head()), floor_bytes(self.workload)
        )

    def measures(self) -> dict[str, float]:
        w = self.workload
        density = self._pairs_a_head() / visible_pairs(w.seq_len, w.causal)
        return {
            "density_achieved": density,
            "uncovered": self.rule.uncovered_share(w.seq_len),
        }

    def _pairs_a_head(self) -> float:
        w = self.workload
        return self.rule.visible_pairs(w.seq_len, w.causal) / w.heads
