"""Unified sequence parallelism (arXiv 2405.07719): Ulysses inside groups of ranks, a ring across.

Rank r is member r mod U of group r // U. A group holds the rows that a rank of a ring of world/U
would hold, shared evenly by its members; the all-to-all makes them whole for a member's heads.
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
from longseq_bench.attention.exact.ring import Ring
from longseq_bench.attention.kernel_attention import KernelAttention
from longseq_bench.attention.tiled import TILE_ROWS
from longseq_bench.core.cost import Cost, dense_cost
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload, divisors
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import AllToAll
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import Name, Order, cut, even, positions_of
from longseq_bench.kernels.base import AttentionKernel


@implementation("usp")
class Usp(KernelAttention, ExactAttention):
    """Exact attention over ulysses × ring ranks."""

    summary = "Ulysses inside groups of ranks, a ring across them; exact"
    many_ranks = True
    overlaps = False

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        ulysses: Annotated[int | None, "ranks that share heads; none: as many as can"] = None,
        ring: Annotated[int | None, "ranks in a ring; none: world size / ulysses"] = None,
        chunk: Annotated[int, "keys a step of the ring at most, tokens"] = 4 * TILE_ROWS,
        order: Annotated[Name, "which tokens a group holds"] = "zigzag",
    ) -> None:
        self.ulysses, self.ring = degrees(workload, group.size, ulysses, ring)
        check_heads(workload, self.ulysses)
        self.order = Order(order, workload.seq_len, self.ring)
        if workload.seq_len < group.size:
            raise WorldError(f"{workload.seq_len} tokens can't be shared by {group.size} ranks")
        super().__init__(workload, group)
        self.chunk = chunk
        u, r = self.ulysses, self.ring
        self.heads_group = group.subgroup([[i * u + j for j in range(u)] for i in range(r)])
        self.ring_group = group.subgroup([[i * u + j for i in range(r)] for j in range(u)])

    def _shard(self) -> Shard:
        runs = self.order.runs(self.group.rank // self.ulysses)
        span = even(sum(map(len, runs)), self.ulysses, self.group.rank % self.ulysses)
        return Shard.of_tokens(self.workload, positions_of(cut(runs, *span)))

    def build_kernel(self) -> AttentionKernel:
        inner = self._inner().build_kernel()
        if self.ulysses == 1:
            return inner
        exchange, w = self._exchange(), self.workload
        if self.ring == 1:
            inner = Skipping(inner, self.group)
        return Staged(exchange, inner, stages(w.heads, w.kv_heads, self.ulysses, 1))

    def cost(self) -> Cost:
        whole, w = dense_cost(self.workload), self.workload
        ring = self._inner().cost().bytes_sent
        if self.ulysses == 1:
            return Cost(whole.flops, whole.floor_bytes, ring)
        sent = exchange_bytes(self._exchange(), w) + ring * (w.kv_heads // self.ulysses)
        return Cost(whole.flops, whole.floor_bytes, sent)

    def _inner(self) -> Ring:
        """The ring of one stage: one key head and the query heads that use it."""
        w = self.workload
        shape = w.model_dump()
        if self.ulysses > 1:
            shape |= {"heads": w.heads // w.kv_heads, "kv_heads": 1}
        small = Workload.model_validate(shape)
        return Ring(small, self.ring_group, chunk=self.chunk, order=self.order.name)

    def _exchange(self) -> AllToAll:
        held = self.order.count(self.group.rank // self.ulysses)
        spans = (even(held, self.ulysses, rank) for rank in range(self.ulysses))
        return AllToAll(self.heads_group, tuple(stop - start for start, stop in spans))


def degrees(
    workload: Workload, size: int, ulysses: int | None, ring: int | None
) -> tuple[int, int]:
    """How many ranks share heads, and how many a ring has; their product is the world.

    Raises WorldError where it is not.
    """
    if ulysses is None and ring is None:
        shared = [d for d in divisors(size) if workload.kv_heads % d == 0]
        ulysses = max(shared)
    if ulysses is None:
        ulysses = size // ring if ring and size % ring == 0 else 0
    if ring is None:
        ring = size // ulysses if ulysses and size % ulysses == 0 else 0
    if ulysses * ring != size:
        asked = " and ".join(
            f"{name} {degree}" for name, degree in (("ulysses", ulysses), ("ring", ring)) if degree
        )
        raise WorldError(
            f"{asked} do not make up {size} ranks; ulysses · ring must be the world size"
        )
    return ulysses, ring
