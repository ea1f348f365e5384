"""DeepSpeed-Ulysses (arXiv 2309.14509): shards of tokens become shards of heads, and back.

Each rank computes whole attention for its heads. Heads go in stages, so that only a stage of them
is held twice.
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
from longseq_bench.distributed.head_exchange import AllToAll
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import Order
from longseq_bench.kernels.base import AttentionKernel, FusedKernel


@implementation("ulysses")
class Ulysses(KernelAttention, ExactAttention):
    """Exact attention of every token to every token, each rank for its heads."""

    summary = "all-to-all turns shards of tokens into shards of heads and back; exact"
    many_ranks = True
    overlaps = False

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        stage: Annotated[int, "key and value heads a rank takes at a time"] = 1,
    ) -> None:
        self.order = Order("contiguous", workload.seq_len, group.size)
        check_heads(workload, group.size)
        if workload.seq_len < group.size:
            raise WorldError(f"{workload.seq_len} tokens can't be shared by {group.size} ranks")
        super().__init__(workload, group)
        self.stage = stage

    def _shard(self) -> Shard:
        return Shard.of_tokens(self.workload, self.order.positions(self.group.rank))

    def build_kernel(self) -> AttentionKernel:
        w, fused = self.workload, FusedKernel(self.workload.causal)
        if self.group.size == 1:
            return fused
        exchange = self._exchange()
        each = stages(w.heads, w.kv_heads, self.group.size, self.stage)
        return Staged(exchange, Skipping(fused, self.group), each)

    def cost(self) -> Cost:
        whole = dense_cost(self.workload)
        sent = exchange_bytes(self._exchange(), self.workload)
        return Cost(whole.flops, whole.floor_bytes, sent)

    def _exchange(self) -> AllToAll:
        counts = tuple(self.order.count(rank) for rank in range(self.group.size))
        return AllToAll(self.group, counts)
