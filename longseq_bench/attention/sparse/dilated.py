"""LongNet's dilated attention (arXiv 2307.02486): segments, each thinned by its rate.

Pairs (segment, rate) are mixed by their softmax denominators, which is one softmax over the
multiset union of what they see. With `mix=groups` each head uses one pair only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from longseq_bench.attention.base import Counts, Positions, implementation
from longseq_bench.attention.exact.kv_loop import Travelling, piece_tokens
from longseq_bench.attention.sparse.segments import (
    Pair,
    Walk,
    segment_tiles,
    share_a_segment,
    shared_tiles,
)
from longseq_bench.attention.tiled import TILE_ROWS, TiledAttention
from longseq_bench.core.cost import (
    Cost,
    attention_flops,
    floor_bytes,
    key_bytes_per_token,
    visible_pairs,
)
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import Piece as Shown
from longseq_bench.distributed.kv_exchange import Ring
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import even
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.spans import NO_INDEX, Index, Part, SpanAttention
from longseq_bench.kernels.sparse_selection import SpansOf, choose, said, span_kernel
from longseq_bench.kernels.tiling import RowBlock
from longseq_bench.patterns.dilated import Rule
from longseq_bench.patterns.segment_spans import classes, segment_spans, sort_walk

Mix = Literal["softmax", "groups"]
SEGMENTS = (1024, 2048)
DILATION = (1, 2)


@implementation("dilated")
class Dilated(TiledAttention):
    """Segments and dilation along the sequence."""

    summary = "LongNet: segments thinned by a rate, mixed by their softmax denominators"
    many_ranks = True
    _permuted = False

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        segments: Annotated[tuple[int, ...], "tokens a segment, one a pair"] = SEGMENTS,
        dilation: Annotated[tuple[int, ...], "rate of each pair"] = DILATION,
        mix: Annotated[Mix, "softmax: all pairs for every head; groups: one pair each"] = "softmax",
        kernel: Annotated[SpansOf, "what computes it; auto: the fastest here"] = "auto",
    ) -> None:
        if workload.seq_len < group.size:
            raise WorldError(f"{workload.seq_len} tokens can't be shared by {group.size} ranks")
        self.rule = Rule(tuple(segments), tuple(dilation), workload.heads, mix)
        super().__init__(workload, group)
        self.requested_kernel, self.kernel_name = kernel, ""
        self.walk = Walk(workload.seq_len)
        self._spans: SpanAttention | None = None
        self.step_of: NDArray[np.int32] | None = None

    def _shard(self) -> Shard:
        steps = self._steps(self.group.rank)
        return Shard.of_tokens(self.workload, np.arange(steps.start, steps.stop))

    def prepare(self, device: str) -> None:
        super().prepare(device)
        if self.group.size > 1 and self.requested_kernel == "native":
            raise UnsupportedError("kernel=native runs on one rank; auto on many")
        self.kernel_name = choose(self.requested_kernel, device, self.workload.dtype)
        self.device, self._spans = device, None
        if self.group.size == 1 and self.kernel_name == "native":
            self._spans = self._span_attention()

    def build_kernel(self) -> AttentionKernel:
        if self.group.size > 1:
            return Travelling(self.courier(), self)
        return self._spans or super().build_kernel()

    def facts(self) -> dict[str, Any]:
        w, longer = self.workload, [s for s in self.rule.segments if s > self.workload.seq_len]
        facts: dict[str, Any] = super().facts()
        if self.group.size == 1:
            facts = said(self.kernel_name, self.device, w.dtype, self.requested_kernel, "tiles")
        if longer:
            words = ", ".join(f"{s:,}" for s in longer)
            facts["segments"] = f"{words} reach beyond {w.seq_len:,} tokens: one segment holds all"
        return facts

    def _span_attention(self) -> SpanAttention:
        """The compiled kernel over spans, with an index where steps are not tokens."""
        w, rule, order = self.workload, self.rule, self.walk.order
        index, sorted_by = NO_INDEX, None
        if order is not None and w.causal:
            both, sorted_by = sort_walk(order, rule), rule
            index = Index(both.queries, both.keys)
        elif order is not None:
            index = Index(order, order)
        parts = [
            Part(segment_spans(w.seq_len, sets, w.causal, sorted_by), heads)
            for sets, heads in classes(rule)
        ]
        return SpanAttention(
            span_kernel(self.kernel_name), lambda: parts, w.causal, (w.heads, w.seq_len), index
        )

    def courier(self) -> Ring:
        """Pieces travel along the walk, as far as any rank's segments reach."""
        counts = tuple(len(self._steps(rank)) for rank in range(self.group.size))
        most = piece_tokens(max(counts), max(counts))
        return Ring(self.group, counts, most, hops=self._hops())

    def own(self, share: int, shares: int) -> Iterator[RowBlock]:
        """What a share of own queries see of own keys."""
        steps = self._steps(self.group.rank)
        parts = -(-len(steps) // TILE_ROWS)
        first, last = (part * TILE_ROWS for part in even(parts, shares, share))
        if first < last:
            yield from self._seen(steps[first:last], steps)

    def of(self, piece: Shown) -> Iterator[RowBlock]:
        """What own queries see of another rank's piece."""
        theirs = self._steps(piece.owner)
        yield from self._seen(self._steps(self.group.rank), theirs[piece.start : piece.stop])

    def _seen(self, rows: range, keys: range) -> Iterator[RowBlock]:
        own = self._steps(self.group.rank)
        runs = tuple(self.head_runs(min(TILE_ROWS, len(own))))
        causal = self.workload.causal
        yield from shared_tiles(self.walk, self._pairs(), runs, causal, own, rows, keys, TILE_ROWS)

    def tiles(self) -> Iterator[RowBlock]:
        w = self.workload
        rows = min(max(TILE_ROWS, *self.rule.segments), w.seq_len)
        for heads in self.head_runs(rows):
            yield from segment_tiles(self.walk, self._pairs(), heads, w.causal, TILE_ROWS)

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        causal = self.workload.causal
        return self.rule.multiplicity(q_positions, k_positions, head, causal, self.step_of)

    def cost(self) -> Cost:
        w, token = self.workload, key_bytes_per_token(self.workload)
        sent = self.courier().bytes_sent(token, token if w.train else 0)
        return Cost(attention_flops(w, self._pairs_a_head()), floor_bytes(w), sent)

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

    def _pairs(self) -> tuple[Pair, ...]:
        return tuple(Pair(*pair) for pair in self.rule.pairs())

    def _steps(self, rank: int) -> range:
        """The steps of the walk that a rank holds."""
        return range(*even(self.workload.seq_len, self.group.size, rank))

    def _hops(self) -> int:
        """How far pieces go until nobody needs them."""
        size, pairs = self.group.size, self._pairs()

        def needed(hop: int) -> bool:
            return any(self._needed(r, (r + hop) % size, pairs) for r in range(size))

        if self.workload.causal and not self._permuted:
            # only what lies behind is seen: who is further off shares no segment either
            return next((hop - 1 for hop in range(1, size) if not needed(hop)), size - 1)
        return next((hop for hop in range(size - 1, 0, -1) if needed(hop)), 0)

    def _needed(self, owner: int, rank: int, pairs: tuple[Pair, ...]) -> bool:
        """Whether a rank's queries see any key of the owner's."""
        before = not self.workload.causal or self._permuted or owner < rank
        return before and share_a_segment(pairs, self._steps(owner), self._steps(rank))
