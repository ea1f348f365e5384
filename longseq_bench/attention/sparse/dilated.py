"""LongNet's dilated attention (arXiv 2307.02486): every rate-th token of a segment.

Pairs (segment, rate) are mixed by their softmax denominators. This equals one softmax over the
multiset union of their keys. With `mix=groups` each head uses one pair only.
"""

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import product
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from longseq_bench.attention.base import Attention, Counts, implementation
from longseq_bench.attention.exact.ring import RingKernel
from longseq_bench.attention.sparse.segments import FEW_PAIRS, SegmentTiles
from longseq_bench.attention.tiles import SIZES, Block, BlockAttention, LocalShare, head_runs
from longseq_bench.core.cost import key_bytes_per_token, visible_pairs
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import RingExchange, ring_blocks
from longseq_bench.distributed.token_order import Positions, Shard, TokenOrder, even_span
from longseq_bench.kernels import native
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.kernels.exact.native import Native
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask, StepMap
from longseq_bench.kernels.tiling import Piece, SetKernel
from longseq_bench.meta_mode import MAX_STEPS, limited
from longseq_bench.patterns.dilated import DilationRule, hilbert_order
from longseq_bench.patterns.spans import heads_by_sets, segment_spans, sort_walk


@implementation("dilated")
class Dilated(Attention):
    """Segments and dilation along the sequence."""

    summary = "LongNet: every rate-th token of a segment; several pairs (segment, rate)"
    many_ranks = takes_sinks = True
    sees_itself = True  # the tokens of a set see each other

    permuted = False
    """True if segments are cut along a permutation of the sequence."""

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        segments: Annotated[
            tuple[int, ...], "segment lengths in tokens, one for each pair (segment, rate)"
        ] = (1024, 2048),
        dilation: Annotated[tuple[int, ...], "dilation rate of each pair"] = (1, 2),
        mix: Annotated[
            Literal["softmax", "groups"],
            "softmax: every head mixes all pairs; groups: each head uses one pair",
        ] = "softmax",
        kernel: Annotated[
            str,
            "kernel of exact attention for gathered segments (on one rank native reads them in "
            "place); auto: the fastest one",
        ] = AUTO,
    ) -> None:
        self.order = TokenOrder("contiguous", workload.seq_len, group.size)
        self.rule = DilationRule(tuple(segments), tuple(dilation), workload.heads, mix)
        self.exact_name = kernel
        super().__init__(workload, group)
        self._sequence = workload.model_copy(update={"batch": 1})
        self.segments = SegmentTiles(workload, tuple(self.rule.pairs()))
        self._spans: AttentionKernel | None = None

    def prepare(self, device: str) -> None:
        """Choose the kernel; on one rank, build the spans of the compiled one or the walk."""
        super().prepare(device)
        w, is_alone = self.workload, self.group.size == 1
        reason = native.unavailable_reason(self.torch_dtype)
        if self.exact_name == AUTO and device == "cpu" and is_alone and not reason:
            # of scattered keys it is the fastest one, also with matrix units for 16 bits
            self.select_exact("native")
        # several ranks hold their tokens in the order of the walk; they need it for causality only
        walk = hilbert_order(w.seq_len) if self.permuted and (is_alone or w.causal) else None
        if is_alone and isinstance(self.exact, Native):
            self._spans = self._build_spans(walk)
        elif is_alone and walk is not None:
            self.segments.follow(walk, device)
        else:
            self.segments.walk = walk

    def build_kernel(self) -> AttentionKernel:
        """Return the kernel of spans or of whole segments; on many ranks a ring."""
        if self._spans:
            return self._spans
        if self.group.size == 1 and len(self.rule.segments) <= FEW_PAIRS:
            # of few parts, each rounded already, a wide sum would be little more exact
            return SetKernel(self.exact, partial(self.segments.whole, SIZES[self.device]))
        return RingKernel(self._exchange(), BlockAttention(self.group, self.exact, self._pieces))

    def _build_spans(self, order: NDArray[np.int32] | None) -> AttentionKernel:
        w, rule = self.workload, self.rule
        steps, sorted_by = StepMap(), None
        if order is not None and w.causal:
            steps, sorted_by = StepMap(*sort_walk(order, rule)), rule
        elif order is not None:
            steps = StepMap(order, order)
        parts = [
            HeadSpans(segment_spans(w.seq_len, sets, w.causal, sorted_by), heads)
            for sets, heads in heads_by_sets(rule).items()
        ]
        task = SpanTask(parts, w.causal, steps, w.scores)
        return SpanAttention(native, task, (w.heads, w.seq_len))

    def _pieces(self, block: Block) -> Iterator[Piece]:
        sizes, (own,) = SIZES[self.device], self.order.runs(self.group.rank)
        if self.group.size == 1:
            yield from self.segments.whole(sizes)
            return
        max_rows = min(sizes.rows, len(own))
        if isinstance(block, LocalShare):
            tiles = -(-len(own) // sizes.rows)
            first, last = (t * sizes.rows for t in even_span(tiles, block.count, block.index))
            rows, keys = own[first:last], own
        else:
            (steps,) = self.order.runs(block.owner)
            rows, keys = own, steps[block.tokens]
        runs = head_runs(self._sequence, max_rows, len(own), sizes)
        for heads, start in limited(product(runs, rows[::max_rows]), MAX_STEPS):
            tile = range(start, min(start + max_rows, rows.stop))
            yield from self.segments.pieces(heads, own, tile, keys)

    def _exchange(self) -> RingExchange:
        """Return the transfers along the walk, with as many hops as segments need."""
        blocks = ring_blocks(self.order.counts, SIZES[self.device].smallest_block)
        hops = self.segments.reach(self.order)
        if hops and not (self.workload.causal and not self.permuted):
            # an earlier rank is reached round the ring: the neighbour by all hops but one
            hops = self.group.size - 1
        return RingExchange(self.group, blocks, hops)

    @override
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        causal = self.workload.causal
        return self.rule.multiplicity(q_positions, k_positions, head, causal, self.step_of)

    @override
    def keys_seen(self, q_positions: Positions, head: int) -> Positions:
        tokens, walk, step_of = self.workload.seq_len, self.walk, self.step_of
        if walk is None or step_of is None:
            return self.rule.steps_seen(q_positions, head, tokens)
        seen = self.rule.steps_seen(step_of[q_positions].astype(np.int64), head, tokens)
        return np.sort(walk[seen]).astype(np.int64)

    @cached_property
    def walk(self) -> NDArray[np.int32] | None:
        """The position of each step of the walk; None if the walk is the sequence."""
        return hilbert_order(self.workload.seq_len) if self.permuted else None

    @cached_property
    def step_of(self) -> NDArray[np.int32] | None:
        """The step of the walk at which each position comes; None if the walk is the sequence."""
        if self.walk is None:
            return None
        steps = np.empty_like(self.walk)
        steps[self.walk] = np.arange(len(steps), dtype=np.int32)
        return steps

    @override
    def kept_pairs(self) -> float:
        w = self.workload
        return self.rule.visible_pairs(w.seq_len, w.causal) / w.heads

    @override
    def bytes_sent(self) -> int:
        token = key_bytes_per_token(self.workload)
        return self._exchange().bytes_sent(token, token if self.workload.train else 0)

    @override
    def measures(self) -> dict[str, float]:
        w = self.workload
        return {
            "density_achieved": self.kept_pairs() / visible_pairs(w.seq_len, w.causal),
            "uncovered": self.rule.uncovered_share(w.seq_len),
        }


# ---- along the Hilbert curve ---------------------------------------------------------------------
# q, k and v are never permuted as a whole: those of some heads are gathered along the walk, and the
# output is written to its place. Causality is that of the sequence.


@implementation("hilbert")
class Hilbert(Dilated):
    """Segments and dilation along the Hilbert curve."""

    summary = "segments and dilation along a Hilbert curve, so that a segment is a 2-D patch"
    permuted = True

    @override
    def build_shard(self) -> Shard:
        shard = super().build_shard()
        if self.group.size == 1:
            # on one rank tokens keep the order of the sequence
            return shard
        walk = hilbert_order(self.workload.seq_len)
        return Shard.of_tokens(self.workload, walk[shard.queries].astype(np.int64))
