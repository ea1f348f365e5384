"""Unified sequence parallelism (arXiv 2405.07719): Ulysses inside groups of ranks, a ring across.

With U ranks in a Ulysses group, rank r is member r mod U of group r // U. A group holds the rows of
one rank of a ring with world/U ranks, split evenly between its members. The all-to-all gives each
member all rows of the group for its heads.
"""

from typing import Annotated

from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.exact.ring import Ring
from longseq_bench.attention.exact.ulysses import (
    SkippableKernel,
    UlyssesKernel,
    check_heads,
    exchange_bytes,
    head_stages,
)
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.core.units import divisors
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import AllToAll
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import (
    OrderName,
    check_tokens,
    even_span,
    order_for,
    positions_of,
    slice_runs,
)
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.patterns.visible_keys import visible_keys


@implementation("usp")
class Usp(Attention):
    """Exact attention on a grid of ulysses x ring ranks."""

    takes_v_head_dim = True
    summary = "Ulysses inside groups of ranks, a ring across them; exact"
    many_ranks = True
    takes_masks = True
    overlaps = False

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        ulysses: Annotated[int | None, "ranks per Ulysses group; none: as many as possible"] = None,
        ring: Annotated[int | None, "ranks per ring; none: world size / ulysses"] = None,
        chunk: Annotated[
            int | None, "maximum keys per step of a ring, in tokens; none: by the kind of device"
        ] = None,
        order: Annotated[OrderName, "assignment of tokens to groups of ranks"] = "zigzag",
        kernel: KernelOption = AUTO,
    ) -> None:
        self.exact_name = kernel
        self.ulysses, self.ring = choose_degrees(workload, group.size, ulysses, ring)
        check_heads(workload, self.ulysses)
        check_tokens(workload.seq_len, group.size)
        self.order = order_for(order, workload, self.ring)
        super().__init__(workload, group)
        u, r = self.ulysses, self.ring
        heads_group = group.subgroup([[i * u + j for j in range(u)] for i in range(r)])
        group_tokens = self.order.counts[group.rank // u]
        spans = (even_span(group_tokens, u, member) for member in range(u))
        self.exchange = AllToAll(heads_group, tuple(stop - start for start, stop in spans))
        # the ring of one stage: one key head and the query heads that use it
        stage = {"heads": workload.heads // workload.kv_heads, "kv_heads": 1} if u > 1 else {}
        self.stage_ring = Ring(
            workload.model_copy(update=stage),
            group.subgroup([[i * u + j for i in range(r)] for j in range(u)]),
            chunk=chunk,
            order=order,
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
        runs = slice_runs(self.order.runs(index), *span)
        return Shard.of_tokens(self.workload, positions_of(runs))

    def build_kernel(self) -> AttentionKernel:
        """Return the all-to-all exchanges around a ring."""
        ring = self.stage_ring.build_kernel()
        if self.ulysses == 1:
            return ring
        inner = SkippableKernel(ring, self.group) if self.ring == 1 else ring
        return UlyssesKernel(self.exchange, inner, head_stages(self.workload, self.ulysses, 1))

    @override
    def work_share(self) -> float:
        # a rank computes the rows of its Ulysses group, for its part of the heads
        rows = self.order.positions(self.group.rank // self.ulysses)
        return visible_keys(self.workload).share(rows) / self.ulysses

    @override
    def bytes_sent(self) -> int:
        w, stage = self.workload, self.stage_ring.bytes_sent()
        if self.ulysses == 1:
            return stage
        return exchange_bytes(self.exchange, w) + stage * (w.kv_heads // self.ulysses)


def choose_degrees(
    workload: Workload, size: int, ulysses: int | None, ring: int | None
) -> tuple[int, int]:
    """Return the number of ranks per Ulysses group and per ring.

    A degree that is None is chosen; if both are, the Ulysses groups are as large as possible.

    Raises:
        WorldError: the product of the degrees is not the world size.
    """
    requested = {"ulysses": ulysses, "ring": ring}
    if ulysses is None:
        largest = max(d for d in divisors(size) if workload.kv_heads % d == 0)
        ulysses = size // ring if ring else largest
    if ring is None:
        ring = size // ulysses
    if ulysses * ring != size:
        degrees = " and ".join(f"{name} {degree}" for name, degree in requested.items() if degree)
        raise WorldError(
            f"{degrees} do not make up {size} ranks; ulysses · ring must be the world size"
        )
    return ulysses, ring
