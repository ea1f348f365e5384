"""All-gather attention: every rank gathers all keys and values, and computes its own query rows.

With a chunk, keys are gathered in pieces: the next piece is gathered while the current one is
computed with, and partial results merge by log-sum-exp.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, Hq, N).
"""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.one_rank import exact_call, single_rank_tiles
from longseq_bench.attention.tiles import (
    SIZES,
    Block,
    BlockAttention,
    ExactPieces,
    LocalShare,
    wide_zeros,
)
from longseq_bench.core.cost import key_bytes_per_token
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.kv_exchange import KVBlock, KVBlocks, KVPair
from longseq_bench.distributed.token_order import OrderName, order_for
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Queries, Triple
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.kernels.tiling import TiledKernel
from longseq_bench.meta_mode import MAX_STEPS, limited


class GatherExchange:
    """Transfers of an all-gather: a block of each rank to all ranks, its gradients to the owner."""

    def __init__(self, group: Group, blocks: KVBlocks) -> None:
        self.group, self.blocks = group, blocks

    def buffer(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return memory for a block of every rank: keys and values (ranks, B, Hk, M, D)."""
        shape = self.group.size, *k.shape[:2], self.blocks.longest
        return [torch.zeros(*shape, t.shape[3], dtype=t.dtype, device=t.device) for t in (k, v)]

    def start(self, k: Tensor, v: Tensor, index: int, buffer: list[Tensor]) -> Pending:
        """Start gathering block `index` of every rank."""
        own = self.blocks.block(self.group.rank, index)
        transfers = []
        for gathered, local in zip(buffer, (k, v), strict=True):
            packed = torch.zeros(gathered.shape[1:], dtype=gathered.dtype, device=gathered.device)
            packed[:, :, : len(own)] = local[:, :, own.tokens]
            transfers.append(self.group.all_gather(gathered, packed))
        return Pending(transfers)

    def other_blocks(self, index: int, gathered: list[Tensor]) -> Iterator[tuple[KVBlock, KVPair]]:
        """Yield block `index` of every other rank, in the order in which a ring brings them."""
        for hop in limited(range(1, self.group.size), MAX_STEPS):
            block = self.blocks.block((self.group.rank - hop) % self.group.size, index)
            k_block, v_block = (t[block.owner, :, :, : len(block)] for t in gathered)
            yield block, (k_block, v_block)

    def return_gradients(self, gathered: list[Tensor], index: int, totals: KVPair) -> None:
        """Send the gradients of each block to its owner, and add those that other ranks sent."""
        own = self.blocks.block(self.group.rank, index)
        for total, gradients in zip(totals, gathered, strict=True):
            returned = torch.empty_like(gradients)
            self.group.all_to_all(returned, gradients).wait()
            for rank in limited(range(self.group.size), MAX_STEPS):
                if rank != self.group.rank:
                    total[:, :, own.tokens].add_(returned[rank, :, :, : len(own)])

    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """Return the bytes that this rank sends in one pass, by formula.

        Arguments are those of RingExchange.bytes_sent. Every block is padded to the longest one.
        """
        tokens = (self.group.size - 1) * self.blocks.per_rank * self.blocks.longest
        return tokens * (2 * token_bytes + gradient_bytes if gradient_bytes else token_bytes)


class GatherKernel:
    """All-gather attention on one rank: forward and backward. An AttentionKernel."""

    def __init__(self, exchange: GatherExchange, attention: BlockAttention) -> None:
        self.exchange, self.attention = exchange, attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and its log-sum-exp."""
        return self.attention.forward(q, v, self._visits(k, v))

    def _visits(self, k: Tensor, v: Tensor) -> Iterator[tuple[Block, KVPair]]:
        """Yield shares of work with own keys, and the blocks that are gathered meanwhile."""
        count = self.exchange.blocks.per_rank
        buffers = [self.exchange.buffer(k, v) for _ in range(min(2, count))]

        transfer = self.exchange.start(k, v, 0, buffers[0])
        indices = [*limited(range(count), MAX_STEPS)]
        for index in indices:
            yield LocalShare(index, count), (k, v)
            transfer.wait()
            gathered = buffers[index % len(buffers)]
            if index < indices[-1]:
                next_buffer = buffers[(index + 1) % len(buffers)]
                transfer = self.exchange.start(k, v, index + 1, next_buffer)
            yield from self.exchange.other_blocks(index, gathered)

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

    many_ranks = takes_masks = takes_v_head_dim = takes_sinks = True
    summary = "all-gather of keys and values; each rank computes its own queries; exact"

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
        w, sizes = self.workload, SIZES[self.device]
        if self.group.size > 1:
            rank = self.group.rank
            pieces = ExactPieces(w, rank, self.order, self.order.runs(rank), sizes)
            return GatherKernel(self.exchange, BlockAttention(self.group, self.exact, pieces))
        if w.mask is not None or self.chunk is None:
            return exact_call(self.exact, w)
        return TiledKernel(lambda: single_rank_tiles(w, self.chunk, sizes), self.exact)

    @override
    def bytes_sent(self) -> int:
        token = key_bytes_per_token(self.workload)
        return self.exchange.bytes_sent(token, token if self.workload.train else 0)

    @override
    def facts(self) -> dict[str, Any]:
        facts = super().facts()
        return facts if self.group.size == 1 else facts | {"piece": self.exchange.blocks.longest}
