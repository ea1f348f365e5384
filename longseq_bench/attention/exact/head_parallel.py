"""Heads split over ranks (tensor parallelism, arXiv 1909.08053), each with the whole sequence.

Alone, nothing travels: q, k and v come split by heads from a tensor-parallel projection. With
`sequence_parallel`, tokens are split outside attention, gathered before and scattered after it
(arXiv 2205.05198): memory between layers falls with ranks, that of attention does not.
"""

from __future__ import annotations

from typing import Annotated

from longseq_bench.attention.base import ExactAttention, implementation
from longseq_bench.attention.exact.all_to_all import (
    Skipping,
    Staged,
    check_heads,
    exchange_bytes,
    stages,
)
from longseq_bench.attention.kernel_attention import KernelAttention
from longseq_bench.core.cost import Cost, dense_cost
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import GatherScatter
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import Order, even
from longseq_bench.kernels.base import AttentionKernel, FusedKernel


@implementation("head-parallel")
class HeadParallel(KernelAttention, ExactAttention):
    """Exact attention, each rank for its heads."""

    summary = "heads split over ranks, each with the whole sequence (model parallel); exact"
    many_ranks = True
    overlaps = False

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        sequence_parallel: Annotated[
            bool, "tokens split outside: gathered before, scattered after (Megatron)"
        ] = False,
    ) -> None:
        self.sequence_parallel = sequence_parallel
        self.order = Order("contiguous", workload.seq_len, group.size)
        check_heads(workload, group.size)
        if sequence_parallel and workload.seq_len < group.size:
            raise WorldError(f"{workload.seq_len} tokens can't be shared by {group.size} ranks")
        super().__init__(workload, group)

    def _shard(self) -> Shard:
        w, rank, size = self.workload, self.group.rank, self.group.size
        if self.sequence_parallel:
            return Shard.of_tokens(w, self.order.positions(rank))
        whole = Shard.full(w)
        heads, kv_heads = (range(*even(n, size, rank)) for n in (w.heads, w.kv_heads))
        return Shard(whole.batch, heads, kv_heads, whole.queries, whole.keys)

    def build_kernel(self) -> AttentionKernel:
        w, fused = self.workload, FusedKernel(self.workload.causal)
        if self.group.size == 1:
            return fused
        if not self.sequence_parallel:
            return Skipping(fused, self.group)
        whole = stages(w.heads, w.kv_heads, self.group.size, w.kv_heads)
        return Staged(self._exchange(), Skipping(fused, self.group), whole)

    def cost(self) -> Cost:
        whole = dense_cost(self.workload)
        sent = 0
        if self.sequence_parallel and self.group.size > 1:
            sent = exchange_bytes(self._exchange(), self.workload)
        return Cost(whole.flops, whole.floor_bytes, sent)

    def _exchange(self) -> GatherScatter:
        counts = tuple(self.order.count(rank) for rank in range(self.group.size))
        return GatherScatter(self.group, counts)
