"""Heads split over ranks, each with the full sequence (tensor parallelism, arXiv 1909.08053).

Attention sends nothing: q, k and v come split by heads from a tensor-parallel projection. With
`sequence_parallel`, tokens are split outside of attention, gathered before it and scattered after
it (arXiv 2205.05198): memory between layers falls with the number of ranks, that of attention does
not.
"""

from dataclasses import replace
from typing import Annotated

from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.exact.ulysses import (
    SkippableKernel,
    UlyssesKernel,
    check_heads,
    exchange_bytes,
    head_stages,
)
from longseq_bench.attention.masked import exact_call
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import GatherScatter
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import TokenOrder, even_span
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.exact.base import AUTO


@implementation("head-parallel")
class HeadParallel(Attention):
    """Exact attention, each rank for its heads."""

    takes_v_head_dim = True
    summary = "heads split over ranks, each rank with the whole sequence (tensor parallel); exact"
    many_ranks = True
    takes_masks = True
    overlaps = False

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        sequence_parallel: Annotated[
            bool, "tokens are split outside: gather before attention, scatter after it (Megatron)"
        ] = False,
        kernel: KernelOption = AUTO,
    ) -> None:
        self.exact_name = kernel
        self.sequence_parallel = sequence_parallel
        check_heads(workload, group.size)
        if sequence_parallel:
            self.order = TokenOrder("contiguous", workload.seq_len, group.size)
            self.exchange = GatherScatter(group, self.order.counts)
        super().__init__(workload, group)

    @override
    def build_shard(self) -> Shard:
        w, rank, size = self.workload, self.group.rank, self.group.size
        if self.sequence_parallel:
            return Shard.of_tokens(w, self.order.positions(rank))
        heads, kv_heads = (range(*even_span(n, size, rank)) for n in (w.heads, w.kv_heads))
        return replace(Shard.full(w), heads=heads, kv_heads=kv_heads)

    def build_kernel(self) -> AttentionKernel:
        """Return one kernel call; with sequence_parallel, between gather and scatter."""
        w, size = self.workload, self.group.size
        one_call = exact_call(self.exact, w)
        if size == 1:
            return one_call
        kernel = SkippableKernel(one_call, self.group)
        if not self.sequence_parallel:
            return kernel
        return UlyssesKernel(self.exchange, kernel, head_stages(w, size, w.kv_heads))

    @override
    def work_share(self) -> float:
        # every rank computes all pairs of its heads
        return 1 / self.group.size

    @override
    def bytes_sent(self) -> int:
        return exchange_bytes(self.exchange, self.workload) if self.sequence_parallel else 0
