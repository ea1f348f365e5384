"""Dilated attention along the Hilbert curve: a segment is a compact 2-D patch.

The sequence fills a grid row by row. Segments and dilation follow the Hilbert curve through it.
q, k and v are never permuted as a whole: the tokens of a segment are gathered when it is computed,
and the output is written to its place. Causality is that of the sequence.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.sparse.dilated import Dilated
from longseq_bench.distributed.shard import Shard
from longseq_bench.patterns.hilbert import hilbert_order


@implementation("hilbert")
class Hilbert(Dilated):
    """Segments and dilation along the Hilbert curve."""

    summary = "segments and dilation along a Hilbert curve, so that a segment is a 2-D patch"
    permuted = True

    @override
    def build_shard(self) -> Shard:
        if self.group.size == 1:
            # on one rank tokens keep the order of the sequence
            return Shard.full(self.workload)
        steps = self.order.positions(self.group.rank)
        walk = hilbert_order(self.workload.seq_len)
        return Shard.of_tokens(self.workload, walk[steps].astype(np.int64))

    def prepare(self, device: str) -> None:
        """Build the walk along the curve."""
        # several ranks hold their tokens in the order of the walk; they need it for causality only
        if self.group.size == 1 or self.workload.causal:
            self.segments.walk = hilbert_order(self.workload.seq_len)
        super().prepare(device)

    @cached_property
    @override
    def step_of(self) -> NDArray[np.int32]:
        order = hilbert_order(self.workload.seq_len)
        steps = np.empty_like(order)
        steps[order] = np.arange(len(order), dtype=np.int32)
        return steps
