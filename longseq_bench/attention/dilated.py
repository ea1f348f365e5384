"""LongNet's dilated attention (arXiv 2307.02486): segments, each thinned by its rate.

Every pair (segment, rate) lets tokens of a segment at one offset modulo the rate see each other;
the offset rotates over heads. Pairs are mixed by their softmax denominators, which is one softmax
over the multiset union of what they see. With `mix=groups` each head uses one pair only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from longseq_bench.attention.base import Counts, Positions, implementation
from longseq_bench.attention.segments import Pair, Walk, segment_tiles
from longseq_bench.attention.tiled import TILE_ROWS, TiledAttention
from longseq_bench.comm.group import Group
from longseq_bench.errors import UnsupportedError
from longseq_bench.kernels.tiles import RowBlock
from longseq_bench.model import Workload
from longseq_bench.patterns import dilated as pattern

Mix = Literal["softmax", "groups"]
SEGMENTS = (1024, 2048)
DILATION = (1, 2)


@implementation("dilated")
class Dilated(TiledAttention):
    """Segments and dilation along the sequence."""

    summary = "LongNet: segments thinned by a rate, mixed by softmax denominators"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        segments: Annotated[tuple[int, ...], "tokens a segment, one a pair"] = SEGMENTS,
        dilation: Annotated[tuple[int, ...], "rate of each pair"] = DILATION,
        mix: Annotated[
            Mix, "softmax: every head uses all pairs; groups: one pair a head"
        ] = "softmax",
    ) -> None:
        super().__init__(workload, group)
        if group.size > 1:
            raise UnsupportedError(
                f"{type(self).__name__.lower()} over several ranks is not part of this version"
            )
        self.rule = pattern.Rule(segments, dilation, workload.heads, mix)
        self.walk = Walk(workload.seq_len)

    def tiles(self) -> Iterator[RowBlock]:
        w = self.workload
        pairs = tuple(Pair(s, r, h) for s, r, h in self.rule.pairs())
        for heads in self.head_runs(min(max(TILE_ROWS, *self.rule.segments), w.seq_len)):
            yield from segment_tiles(self.walk, pairs, heads, w.causal, TILE_ROWS)

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self.rule.multiplicity(q_positions, k_positions, head, self.workload.causal)
