"""Exact attention with the tokens of q, k, v and the output spread over ranks.

Ring and all-gather differ in how keys and values come by (a courier); what own queries see of them
is the same.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from longseq_bench.attention.base import ExactAttention
from longseq_bench.attention.exact.kv_loop import ROWS, ExactRows, Travelling
from longseq_bench.attention.tiled import TILE_ROWS, TiledAttention
from longseq_bench.core.cost import Cost, dense_cost, key_bytes_per_token
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import KVExchange
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import Name, Order, positions_of
from longseq_bench.kernels.base import AttentionKernel, InPlaceTiledKernel


class Sharded(TiledAttention, ExactAttention):
    """Tokens in an order over the ranks; on one rank a plan of tiles (`tiles`)."""

    many_ranks = True

    def __init__(self, workload: Workload, group: Group, order: Name) -> None:
        self.order = Order(order, workload.seq_len, group.size)
        if workload.seq_len < group.size:
            raise WorldError(f"{workload.seq_len} tokens can't be shared by {group.size} ranks")
        super().__init__(workload, group)

    @abstractmethod
    def courier(self) -> KVExchange:
        """How keys and values come by."""

    def build_kernel(self) -> AttentionKernel:
        if self.group.size == 1:
            return InPlaceTiledKernel(self.tiles)
        return Travelling(self.courier(), self.own_rows())

    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(self.order.count(rank) for rank in range(self.group.size))

    def rows(self) -> tuple[range, ...]:
        """Positions of own queries."""
        return self.order.runs(self.group.rank)

    def own_rows(self) -> ExactRows:
        """What own queries see."""
        tile = max(1, min(ROWS, len(self.shard.queries)))
        # keys are views; only their gradients take memory
        most = TILE_ROWS if self.workload.train else self.workload.seq_len
        runs = tuple(self.head_runs(tile))
        causal, rank = self.workload.causal, self.group.rank
        return ExactRows(rank, self.rows(), self.order.runs, causal, runs, tile, most)

    def cost(self) -> Cost:
        whole, token = dense_cost(self.workload), key_bytes_per_token(self.workload)
        sent = self.courier().bytes_sent(token, token if self.workload.train else 0)
        return Cost(whole.flops, whole.floor_bytes, sent)

    def facts(self) -> dict[str, Any]:
        here = super().facts()
        return here | {"piece": self.courier().most} if self.group.size > 1 else here

    def _shard(self) -> Shard:
        runs = self.order.runs(self.group.rank)
        keys = positions_of(runs)
        queries = keys if self.rows() == runs else positions_of(self.rows())
        return Shard.of_tokens(self.workload, queries, keys)
