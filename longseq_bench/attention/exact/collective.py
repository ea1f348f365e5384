"""All-gather attention: every rank gathers all keys and values, and computes its own query rows.

With a chunk, keys are gathered in pieces: the next piece is gathered while the current one is
computed with, and partial results merge by log-sum-exp.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, Hq, N).
"""

from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.one_rank import exact_call, single_rank_tiles
from longseq_bench.attention.tiles import (
    BlockAttention,
    ExactBlocks,
    LocalShare,
    empty_softmax,
    tile_sizes,
    wide_zeros,
)
from longseq_bench.core.cost import key_bytes_per_token
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import GatherExchange, KVBlocks, KVPair
from longseq_bench.distributed.token_order import OrderName, order_for
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Queries, Triple
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.kernels.tiling import InPlaceTiledKernel
from longseq_bench.meta_mode import MAX_STEPS, limited


class GatherKernel:
    """All-gather attention on one rank: forward and backward. An AttentionKernel."""

    def __init__(self, exchange: GatherExchange, attention: BlockAttention) -> None:
        self.exchange, self.attention = exchange, attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and its log-sum-exp."""
        out, lse = empty_softmax(q, v)
        count = self.exchange.blocks.per_rank
        buffers = [self.exchange.buffer(k, v) for _ in range(min(2, count))]

        transfer = self.exchange.start(k, v, 0, buffers[0])
        for index in limited(range(count), MAX_STEPS):
            self.attention.forward(q, (k, v), LocalShare(index, count), out, lse)
            transfer.wait()
            gathered = buffers[index % len(buffers)]
            if index + 1 < count:
                next_buffer = buffers[(index + 1) % len(buffers)]
                transfer = self.exchange.start(k, v, index + 1, next_buffer)
            for block, kv_block in self.exchange.other_blocks(index, gathered):
                self.attention.forward(q, kv_block, block, out, lse)
        return out.to(q.dtype), lse

    def backward(self, queries: Queries, keys: KVPair) -> Triple:
        """Return the gradients of q, k and v; those of gathered keys go back to their owners."""
        (_, q, _, lse), (k, v) = queries, keys
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = wide_zeros(keys)
        count = self.exchange.blocks.per_rank
        gathered = self.exchange.buffer(k, v)

        for index in limited(range(count), MAX_STEPS):
            transfer = self.exchange.start(k, v, index, gathered)
            self.attention.backward(queries, keys, LocalShare(index, count), dq, dkv)
            transfer.wait()
            gradients = [torch.zeros_like(t) for t in gathered]
            for block, kv_block in self.exchange.other_blocks(index, gathered):
                dkv_block = wide_zeros(kv_block)
                self.attention.backward(queries, kv_block, block, dq, dkv_block)
                for target, gradient in zip(gradients, dkv_block, strict=True):
                    target[block.owner, :, :, : len(block)] = gradient
            self.exchange.return_gradients(gradients, index, dkv)

        dk, dv = (total.to(k.dtype) for total in dkv)
        return dq.to(q.dtype), dk, dv


@implementation("collective")
class Collective(Attention):
    """Exact attention of local query rows to gathered keys and values."""

    takes_v_head_dim = True
    summary = "all-gather of keys and values; each rank computes its own queries; exact"
    many_ranks = True
    takes_masks = True

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        chunk: Annotated[
            int | None, "tokens gathered at a time, over all ranks; none: all at once"
        ] = None,
        order: Annotated[OrderName, "assignment of tokens to ranks"] = "zigzag",
        kernel: KernelOption = AUTO,
    ) -> None:
        self.exact_name = kernel
        self.order = order_for(order, workload, group.size)
        super().__init__(workload, group)
        self.chunk = chunk
        self.overlaps = chunk is not None
        limit = max(self.order.counts)
        if chunk is not None:
            limit = min(limit, max(1, chunk // group.size))
        self.exchange = GatherExchange(group, KVBlocks(self.order.counts, limit))

    def build_kernel(self) -> AttentionKernel:
        """Return the all-gather; on one rank a single kernel call, or a loop over chunks."""
        w, sizes = self.workload, tile_sizes(self.device)
        if self.group.size > 1:
            rank = self.group.rank
            queries = self.order.runs(rank)
            blocks = ExactBlocks(w, self.group, self.exact, self.order, queries, sizes)
            return GatherKernel(self.exchange, blocks)
        if w.mask is not None or self.chunk is None:
            return exact_call(self.exact, w)
        return InPlaceTiledKernel(lambda: single_rank_tiles(w, self.chunk, sizes), self.exact)

    @override
    def bytes_sent(self) -> int:
        token = key_bytes_per_token(self.workload)
        return self.exchange.bytes_sent(token, token if self.workload.train else 0)

    @override
    def facts(self) -> dict[str, Any]:
        facts = super().facts()
        return facts if self.group.size == 1 else facts | {"piece": self.exchange.blocks.longest}
