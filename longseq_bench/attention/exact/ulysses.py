"""DeepSpeed-Ulysses (arXiv 2309.14509): shards of tokens become shards of heads, and back.

UlyssesKernel is the loop: all-to-all, attention over the full sequence for this rank's heads,
all-to-all back. It takes a stage of heads at a time, so that only one stage is in memory twice.
Backward exchanges the inputs again instead of keeping them. USP and Megatron's sequence parallelism
use the same loop with another inner attention or another exchange.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, heads of this rank, all tokens).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.masked import exact_call
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.core.units import divisors
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import AllToAll, GatherScatter, HeadExchange, HeadStage
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import TokenOrder, even_span
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import AUTO


class UlyssesKernel:
    """Attention between two exchanges of tokens for heads. An AttentionKernel.

    stages: query heads and key heads of each stage.
    """

    def __init__(
        self,
        exchange: HeadExchange,
        inner: AttentionKernel,
        stages: Sequence[tuple[HeadStage, HeadStage]],
    ) -> None:
        self.exchange, self.inner, self.stages = exchange, inner, stages

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp of this rank's heads."""
        out, lse_of_stages = q.new_empty(*q.shape[:3], v.shape[3]), []
        to_heads = self.exchange.to_heads
        for q_heads, kv_heads in self.stages:
            q_full, k_full, v_full = to_heads(q, q_heads), *(to_heads(t, kv_heads) for t in (k, v))
            out_full, lse = self.inner.forward(q_full, k_full, v_full, keep_lse)
            del q_full, k_full, v_full
            self.exchange.to_tokens(out_full, out, q_heads)
            del out_full
            if keep_lse and lse is not None:
                lse_of_stages.append(lse)
        return out, torch.cat(lse_of_stages, 1) if lse_of_stages else None

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        (grad_out, q, out, lse), (k, v) = queries, keys
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        to_heads = self.exchange.to_heads
        lse_of_stages = torch.split(lse, [q_heads.count for q_heads, _ in self.stages], 1)
        for (q_heads, kv_heads), stage_lse in zip(self.stages, lse_of_stages, strict=True):
            grad_out_full, q_full = to_heads(grad_out, q_heads), to_heads(q, q_heads)
            keys_full = to_heads(k, kv_heads), to_heads(v, kv_heads)
            queries_full = grad_out_full, q_full, to_heads(out, q_heads), stage_lse.contiguous()
            grads_full = self.inner.backward(queries_full, keys_full)
            del queries_full, grad_out_full, q_full, keys_full
            stage_heads = q_heads, kv_heads, kv_heads
            for full, grad, heads in zip(grads_full, grads, stage_heads, strict=True):
                self.exchange.to_tokens(full, grad, heads)
            del grads_full, full
        return grads


class SkippableKernel:
    """An AttentionKernel that computes nothing while communication alone is timed."""

    def __init__(self, inner: AttentionKernel, group: Group) -> None:
        self._inner, self._group = inner, group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the inner kernel's output; if nothing is computed, q or zeros of its size."""
        if self._group.computes:
            return self._inner.forward(q, k, v, keep_lse)
        out = q if q.shape[3] == v.shape[3] else q.new_zeros(*q.shape[:3], v.shape[3])
        return out, q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the inner kernel's gradients; q, k and v if nothing is computed."""
        if self._group.computes:
            return self._inner.backward(queries, keys)
        return queries[1], *keys


def head_stages(w: Workload, ranks: int, stage_heads: int) -> list[tuple[HeadStage, HeadStage]]:
    """Return stages of `stage_heads` key heads per rank, with the query heads that use them.

    The last stage may have fewer heads.
    """
    group, own = w.heads // w.kv_heads, w.kv_heads // ranks
    stages = []
    for start in range(0, own, stage_heads):
        count = min(stage_heads, own - start)
        kv_heads = HeadStage(start * ranks, count)
        stages.append((HeadStage(kv_heads.first * group, count * group), kv_heads))
    return stages


def check_heads(workload: Workload, ranks: int) -> None:
    """Raise WorldError if heads or KV heads cannot be split evenly over ranks."""
    w = workload
    for name, heads in (("heads", w.heads), ("kv_heads", w.kv_heads)):
        if heads % ranks:
            allowed = ", ".join(map(str, divisors(w.kv_heads)))
            message = f"{heads} {name} can't be split over {ranks} ranks; possible: {allowed}"
            raise WorldError(message)


def exchange_bytes(exchange: HeadExchange, w: Workload) -> int:
    """Return the bytes that one pass of UlyssesKernel sends.

    Forward: q, k, v to heads and out to tokens. Backward: grad_out, q, k, v, out to heads and dq,
    dk, dv to tokens.
    """
    both = (2, 1) if w.train else (1, 0)
    # heads, elements per head, and how often such tensors are sent to heads and to tokens
    tensors = (
        (w.heads, w.head_dim, both),
        (w.heads, w.v_head_dim, (2, 1) if w.train else (0, 1)),
        (w.kv_heads, w.head_dim, both),
        (w.kv_heads, w.v_head_dim, both),
    )
    return sum(
        exchange.bytes_sent(w.batch * elements * w.dtype_bytes, heads, *times)
        for heads, elements, times in tensors
    )


@implementation("ulysses")
class Ulysses(Attention):
    """Exact attention of every token to every token, each rank for its heads."""

    takes_v_head_dim = True
    summary = "all-to-all turns shards of tokens into shards of heads and back; exact"
    many_ranks = True
    takes_masks = True
    overlaps = False

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        stage: Annotated[int, "KV heads that a rank exchanges at a time"] = 1,
        kernel: KernelOption = AUTO,
    ) -> None:
        self.exact_name = kernel
        self.order = TokenOrder("contiguous", workload.seq_len, group.size)
        check_heads(workload, group.size)
        super().__init__(workload, group)
        self.stage = stage
        self.exchange = AllToAll(group, self.order.counts)

    def build_kernel(self) -> AttentionKernel:
        """Return the exchanges around one kernel call; on one rank the call alone."""
        w, one_call = self.workload, exact_call(self.exact, self.workload)
        if self.group.size == 1:
            return one_call
        stages = head_stages(w, self.group.size, self.stage)
        return UlyssesKernel(self.exchange, SkippableKernel(one_call, self.group), stages)

    @override
    def work_share(self) -> float:
        # every rank computes all pairs of its heads
        return 1 / self.group.size

    @override
    def bytes_sent(self) -> int:
        return exchange_bytes(self.exchange, self.workload)


@implementation("head-parallel")
class HeadParallel(Attention):
    """Exact attention, each rank for its heads of the whole sequence (arXiv 1909.08053).

    Attention sends nothing: q, k and v come split by heads from a tensor-parallel projection. With
    `sequence_parallel`, tokens are split outside of attention, gathered before it and scattered
    after it (arXiv 2205.05198): memory between layers falls with the number of ranks, that of
    attention does not.
    """

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
        shard, w, group = super().build_shard(), self.workload, self.group
        if self.sequence_parallel:
            return shard
        spans = (even_span(n, group.size, group.rank) for n in (w.heads, w.kv_heads))
        heads, kv_heads = (range(*span) for span in spans)
        return replace(shard, heads=heads, kv_heads=kv_heads)

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
