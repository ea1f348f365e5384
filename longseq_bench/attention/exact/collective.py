"""All-gather attention: every rank sees all keys and values and computes its own query rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from longseq_bench.attention.base import implementation
from longseq_bench.attention.exact.token_parallel import Sharded
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import Gather, KVExchange
from longseq_bench.distributed.token_order import Name
from longseq_bench.kernels.base import AttentionKernel, TiledKernel
from longseq_bench.kernels.tiling import ALL, Piece, RowBlock


@implementation("collective")
class Collective(Sharded):
    """Exact attention of own query rows to gathered keys and values."""

    summary = "all keys and values gathered, own query rows; on one rank nothing is gathered"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        chunk: Annotated[int | None, "gather this many tokens at a time; none: all at once"] = None,
        order: Annotated[Name, "which tokens a rank holds"] = "zigzag",
    ) -> None:
        super().__init__(workload, group, order)
        self.chunk = chunk
        self.overlaps = chunk is not None

    def courier(self) -> KVExchange:
        most = max(self.counts())
        tokens = most if self.chunk is None else max(1, self.chunk // self.group.size)
        return Gather(self.group, self.counts(), min(most, tokens))

    def build_kernel(self) -> AttentionKernel:
        # one call takes all rows, and is not over before it has read all of them
        whole = self.group.size == 1 and self.chunk is None
        return TiledKernel(self.tiles) if whole else super().build_kernel()

    def tiles(self) -> Iterator[RowBlock]:
        w = self.workload
        if self.chunk is None:
            heads = slice(0, w.heads)
            yield RowBlock(ALL, heads, (Piece(ALL, ALL, heads, w.causal),))
            return
        yield from self.exact_tiles(self.chunk)
