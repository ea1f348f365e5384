"""DeepSpeed-Ulysses (arXiv 2309.14509): shards of tokens become shards of heads, and back.

UlyssesKernel is the loop: all-to-all, attention over the full sequence for this rank's heads,
all-to-all back. Of fewer KV heads than ranks, several ranks have the same one, whose gradient is
the sum of theirs. It takes a stage of heads at a time, so that only one stage is in memory twice.
Backward exchanges the inputs again instead of keeping them. USP and Megatron's sequence parallelism
use the same loop with another inner attention or another exchange.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, heads of this rank, all tokens).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.exact.ring import Ring
from longseq_bench.attention.one_rank import exact_call
from longseq_bench.core.cost import mask_pairs
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.core.units import divisors
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import AllToAll, GatherScatter, HeadStage
from longseq_bench.distributed.token_order import (
    Shard,
    TokenOrder,
    check_tokens,
    even_span,
    order_for,
    slice_runs,
)
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Pair, Queries, Triple
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.patterns.visible_keys import visible_keys


class UlyssesKernel:
    """Attention between two exchanges of tokens for heads. An AttentionKernel.

    inner: returns the kernel of some query heads.
    stages: query heads and key heads of each stage.
    """

    def __init__(
        self,
        exchange: AllToAll,
        inner: Callable[[slice], AttentionKernel],
        stages: Sequence[tuple[HeadStage, HeadStage]],
    ) -> None:
        self.exchange, self.stages, rank = exchange, stages, exchange.group.rank
        self.inner = [inner(q_heads.of(rank)) for q_heads, _ in stages]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp of this rank's heads."""
        out, lse_of_stages = q.new_empty(*q.shape[:3], v.shape[3]), []
        to_heads = self.exchange.to_heads
        for inner, (q_heads, kv_heads) in zip(self.inner, self.stages, strict=True):
            q_full, k_full, v_full = to_heads(q, q_heads), *(to_heads(t, kv_heads) for t in (k, v))
            out_full, lse = inner.forward(q_full, k_full, v_full, keep_lse)
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
        stages = zip(self.inner, self.stages, lse_of_stages, strict=True)
        for inner, (q_heads, kv_heads), stage_lse in stages:
            grad_out_full, q_full = to_heads(grad_out, q_heads), to_heads(q, q_heads)
            keys_full = to_heads(k, kv_heads), to_heads(v, kv_heads)
            queries_full = grad_out_full, q_full, to_heads(out, q_heads), stage_lse.contiguous()
            grads_full = inner.backward(queries_full, keys_full)
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

    With fewer key heads than ranks, there is one stage, of a copy on each rank that needs one.
    """
    if w.kv_heads < ranks:
        return [(HeadStage(0, w.heads // ranks), HeadStage(0, 1, ranks // w.kv_heads))]
    count, group = stage_heads, w.heads // w.kv_heads
    starts = range(0, w.kv_heads, count * ranks)
    return [(HeadStage(kv * group, count * group), HeadStage(kv, count)) for kv in starts]


def check_heads(workload: Workload, ranks: int, copies: bool = False) -> None:
    """Raise WorldError if the heads cannot be split evenly over ranks.

    copies: ranks may have the same KV head, if the query heads of each rank use one alone.
    """
    heads, kv_heads = workload.heads, workload.kv_heads
    allowed = [n for n in divisors(heads) if kv_heads % n == 0 or (copies and n % kv_heads == 0)]
    if ranks not in allowed:
        of_kv = f" with {kv_heads} kv_heads" if heads != kv_heads else ""
        possible = ", ".join(map(str, allowed))
        raise WorldError(
            f"{heads} heads{of_kv} can't be split over {ranks} ranks; possible: {possible}"
        )


def exchange_bytes(exchange: AllToAll, w: Workload) -> int:
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


class HeadSplit(Attention):
    """Exact attention whose ranks compute all pairs of their heads."""

    many_ranks = takes_masks = takes_v_head_dim = takes_sinks = True
    overlaps = False

    @override
    def add_sinks(self, kernel: AttentionKernel, heads: slice | None = None) -> AttentionKernel:
        # between exchanges a rank has the log-sum-exp of its own heads: the sinks are inside
        if isinstance(kernel, (UlyssesKernel, SkippableKernel)):
            return kernel
        return super().add_sinks(kernel, heads)

    def skippable(self, kernel: AttentionKernel) -> Callable[[slice], AttentionKernel]:
        """Return the kernel of some heads, with their sinks, that computes only if it should."""
        return lambda heads: SkippableKernel(self.add_sinks(kernel, heads), self.group)

    @override
    def work_share(self) -> float:
        return 1 / self.group.size


@implementation("ulysses")
class Ulysses(HeadSplit):
    """Exact attention of every token to every token, each rank for its heads."""

    summary = "all-to-all turns shards of tokens into shards of heads and back; exact"

    def __init__(self, workload: Workload, group: Group, *, kernel: KernelOption = AUTO) -> None:
        self.exact_name = kernel
        self.order = TokenOrder("contiguous", workload.seq_len, group.size)
        check_heads(workload, group.size, copies=True)
        super().__init__(workload, group)
        self.exchange = AllToAll(group, self.order.counts)

    def build_kernel(self) -> AttentionKernel:
        """Return the exchanges around one kernel call; on one rank the call alone."""
        w = self.workload
        if self.group.size == 1:
            return exact_call(self.exact, w)
        stages = head_stages(w, self.group.size, 1)
        stage = w.model_copy(update={"heads": stages[0][0].count, "kv_heads": 1})
        kernel = exact_call(self.exact, stage)
        return UlyssesKernel(self.exchange, self.skippable(kernel), stages)

    @override
    def bytes_sent(self) -> int:
        return exchange_bytes(self.exchange, self.workload)


@implementation("head-parallel")
class HeadParallel(HeadSplit):
    """Exact attention, each rank for its heads of the whole sequence (arXiv 1909.08053).

    Attention sends nothing: q, k and v come split by heads from a tensor-parallel projection. With
    `sequence_parallel`, tokens are split outside of attention, gathered before it and scattered
    after it (arXiv 2205.05198): memory between layers falls with the number of ranks, that of
    attention does not.
    """

    summary = "heads split over ranks, each rank with the whole sequence (tensor parallel); exact"

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
        if size == 1:
            return exact_call(self.exact, w)
        own = w.model_copy(update={"heads": w.heads // size, "kv_heads": w.kv_heads // size})
        kernel = self.skippable(exact_call(self.exact, own))
        if not self.sequence_parallel:
            return kernel(slice(self.shard.heads.start, self.shard.heads.stop))
        return UlyssesKernel(self.exchange, kernel, head_stages(w, size, w.kv_heads // size))

    @override
    def bytes_sent(self) -> int:
        return exchange_bytes(self.exchange, self.workload) if self.sequence_parallel else 0


@implementation("usp")
class Usp(HeadSplit):
    """Exact attention on a grid of ulysses x ring ranks (arXiv 2405.07719).

    With U ranks in a Ulysses group, rank r is member r mod U of group r // U. A group holds the
    rows of one rank of a ring with world/U ranks, split evenly between its members. The all-to-all
    gives each member all rows of the group for its heads.
    """

    summary = "Ulysses inside groups of ranks, a ring across them; exact"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        ulysses: Annotated[int | None, "ranks per Ulysses group; none: as many as possible"] = None,
        kernel: KernelOption = AUTO,
    ) -> None:
        self.exact_name = kernel
        if ulysses is None:
            ulysses = max(d for d in divisors(group.size) if workload.kv_heads % d == 0)
        if group.size % ulysses:
            raise WorldError(f"ulysses={ulysses} does not divide {group.size} ranks")
        self.ulysses, self.ring = ulysses, group.size // ulysses
        check_heads(workload, self.ulysses, copies=True)
        check_tokens(workload.seq_len, group.size)
        self.order = order_for("zigzag", workload, self.ring)
        super().__init__(workload, group)
        u, r = self.ulysses, self.ring
        heads_group = group.subgroup([[i * u + j for j in range(u)] for i in range(r)])
        group_tokens = self.order.counts[group.rank // u]
        spans = (even_span(group_tokens, u, member) for member in range(u))
        self.exchange = AllToAll(heads_group, tuple(stop - start for start, stop in spans))
        self.stages = head_stages(workload, u, 1)
        # the ring of one stage: one key head and the query heads that use it
        stage = {"heads": self.stages[0][0].count, "kv_heads": 1} if u > 1 else {}
        self.stage_ring = Ring(
            workload.model_copy(update=stage),
            group.subgroup([[i * u + j for i in range(r)] for j in range(u)]),
            kernel=kernel,
        )

    def prepare(self, device: str) -> None:
        """Choose the kernel of the ring."""
        super().prepare(device)
        self.stage_ring.prepare(device)
        self._exact = self.stage_ring.exact

    @override
    def build_shard(self) -> Shard:
        index, member = divmod(self.group.rank, self.ulysses)
        span = even_span(self.order.counts[index], self.ulysses, member)
        return Shard.of_tokens(self.workload, slice_runs(self.order.runs(index), *span))

    def build_kernel(self) -> AttentionKernel:
        """Return the all-to-all exchanges around a ring."""
        ring = self.stage_ring.build_kernel()
        if self.ulysses == 1:
            return ring
        inner = self.skippable(ring) if self.ring == 1 else partial(self.add_sinks, ring)
        return UlyssesKernel(self.exchange, inner, self.stages)

    @override
    def work_share(self) -> float:
        # a rank computes the rows of its Ulysses group, for its part of the heads
        rows = self.order.runs(self.group.rank // self.ulysses)
        return visible_keys(self.workload).pairs(rows) / mask_pairs(self.workload) / self.ulysses

    @override
    def bytes_sent(self) -> int:
        w, stage = self.workload, self.stage_ring.bytes_sent()
        if self.ulysses == 1:
            return stage
        return exchange_bytes(self.exchange, w) + stage * len(self.stages)
