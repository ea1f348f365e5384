"""Ring attention (arXiv 2310.01889).

Each of p ranks holds n/p rows of q, k, v and the output. Blocks of keys and values go round the
ring of ranks. At each step a rank passes the current block on, computes the attention of its own
queries to that block while the transfer runs, merges the result by log-sum-exp, and waits for the
next block. A rank holds its own rows and three blocks of keys and values, a small part of
its rows each; in the backward also gradients of three blocks.

On one rank the loop runs over chunks of the own keys (`single_rank_tiles`), or on a GPU over heads.
A step of decoding is in attention/decode.py.

Shapes: q, out (B, Hq, N, D); k, v (B, Hk, N, D); lse (B, Hq, N); a block of keys (B, Hk, M, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, KernelOption, implementation
from longseq_bench.attention.one_rank import masked_kernel, single_rank_tiles
from longseq_bench.attention.tiles import (
    SIZES,
    Block,
    BlockAttention,
    ExactPieces,
    LocalShare,
    whole_runs,
    wide_zeros,
)
from longseq_bench.core.cost import key_bytes_per_token
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import DTYPE_BYTES, DType, Workload
from longseq_bench.distributed import deepspeed_transport
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import (
    KVPair,
    RingBuffers,
    RingExchange,
    RingGradients,
    ring_blocks,
)
from longseq_bench.distributed.token_order import OrderName, Runs, Shard, order_for
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Queries, Triple
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.kernels.host_memory import StreamedKernel
from longseq_bench.kernels.tiling import ALL, Piece, SetKernel, TiledKernel
from longseq_bench.meta_mode import limited

FINE_TO_COARSE: tuple[DType, ...] = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class RingKernel:
    """Ring attention on one rank: forward and backward. An AttentionKernel.

    ring: the transfers. attention: attention of local queries to one block, for any pattern.
    full_queries: every rank holds all queries and computes everything, so the gradients of its own
    keys are complete and are not sent.
    """

    ring: RingExchange
    attention: BlockAttention
    full_queries: bool = False

    def _visits(self, k: Tensor, v: Tensor) -> Iterator[tuple[Block, KVPair]]:
        """Yield the blocks that visit this rank, and between them shares of work with its own keys.

        While the caller computes with one of these, the next block is transferred.
        """
        steps = self.ring.steps()
        first_step, *next_steps = [*steps, None]
        buffers = RingBuffers(self.ring, k, v)

        transfer = buffers.start(first_step)
        yield LocalShare(0, len(steps) + 1), (k, v)
        for i, (step, next_step) in enumerate(zip(steps, next_steps, strict=True), 1):
            transfer.wait()
            kv_block = buffers.take_block(step)
            transfer = buffers.start(next_step)
            yield self.ring.block_at(step), kv_block
            del kv_block
            yield LocalShare(i, len(steps) + 1), (k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and its log-sum-exp."""
        return self.attention.forward(q, v, self._visits(k, v))

    def backward(self, queries: Queries, keys: KVPair) -> Triple:
        """Return the gradients of q, k and v. Gradients of a block follow it round the ring."""
        (_, q, _, lse), (k, v) = queries, keys
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = wide_zeros(keys)
        returns = self.ring.hops > 0 and not self.full_queries
        gradients = RingGradients(self.ring, keys, dkv) if returns else None
        for block, kv in self._visits(k, v):
            if isinstance(block, LocalShare):
                self.attention.backward(queries, kv, block, dq, dkv)
                if gradients:
                    gradients.collect()
                continue
            dkv_block = wide_zeros(kv)
            if gradients:
                gradients.start(dkv_block)
            self.attention.backward(queries, kv, block, dq, dkv_block)
            del dkv_block
        if gradients:
            gradients.start(None)
            gradients.collect()
        dk, dv = (total.to(k.dtype) for total in dkv)
        return dq.to(q.dtype), dk, dv


@implementation("ring")
class Ring(Attention):
    """Exact attention, block by block, merged by log-sum-exp."""

    many_ranks = takes_masks = takes_v_head_dim = takes_sinks = True
    takes_decode = takes_latent = takes_kv_dtype = True
    summary = "blocks of keys and values pass from rank to rank; exact, minimal memory"

    def __new__(cls, workload: Workload, group: Group, **options: Any) -> Ring:
        """Return the ring of the workload and its transport."""
        # here, because both modules import this one
        from longseq_bench.attention import decode
        from longseq_bench.attention.exact import ring_fairscale

        if workload.decode:
            cls = decode.DecodeRing
        elif options.get("transport") == "fairscale" and group.size > 1:
            cls = ring_fairscale.FairscaleRing
        return super().__new__(cls)

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        chunk: Annotated[
            int | None, "maximum keys per step, in tokens; none: by the kind of device"
        ] = None,
        order: Annotated[OrderName, "assignment of tokens to ranks"] = "zigzag",
        queries: Annotated[
            Literal["partitioned", "full"],
            "partitioned: each rank holds its part of q; full: every rank holds all of q, which "
            "saves no work",
        ] = "partitioned",
        transport: Annotated[
            Literal["p2p", "deepspeed", "fairscale"],
            "p2p: asynchronous send and receive; deepspeed: DeepSpeed's blocking ones; "
            "fairscale: as p2p, in a module with projections that FairScale shards",
        ] = "p2p",
        wire_dtype: Annotated[
            Literal["float32", "bfloat16", "float16"] | None,
            "dtype in which keys and values are sent; none: that of the workload",
        ] = None,
        offload: Annotated[
            Literal["none", "host"],
            "host: keep q, k, v and the output in host memory (pinned; on a CPU a mapped file) and "
            "stream them through the device; one rank",
        ] = "none",
        kernel: KernelOption = AUTO,
    ) -> None:
        self.exact_name, self.offload, self.on_host = kernel, offload, offload == "host"
        self.chunk, self.queries, self.transport = chunk, queries, transport
        self.wire: DType | None = wire_dtype if wire_dtype != workload.dtype else None
        self.order = order_for(order, workload, group.size)
        self.refuse(workload, group)
        super().__init__(workload, group)

    def refuse(self, w: Workload, group: Group) -> None:
        """Raise UnsupportedError or WorldError for options that can't compute a workload."""
        if self.on_host and group.size > 1:
            raise WorldError("offload=host runs on one rank")
        if self.on_host and w.mask is not None:
            raise UnsupportedError(f"offload=host streams no mask, and this one is {w.mask}")
        if self.on_host and (w.sink or w.v_head_dim != w.head_dim):
            raise UnsupportedError("offload=host needs a v_head_dim like head_dim, and no sink")
        if self.transport != "p2p" and group.size > 1 and find_spec(self.transport) is None:
            library = {"deepspeed": "DeepSpeed", "fairscale": "FairScale"}[self.transport]
            install = "pip install 'longseq-bench[transports]' brings it"
            raise UnsupportedError(f"{library} is not installed; {install}")

    @override
    def build_shard(self) -> Shard:
        shard = super().build_shard()
        if self.queries == "partitioned":
            return shard
        return replace(shard, query_tokens=self._query_runs())

    def _query_runs(self) -> Runs:
        """Return the positions of the local queries.

        With queries=full they are listed run by run, because a tile's rows and keys need the same
        step.
        """
        if self.queries == "partitioned":
            return self.order.runs(self.group.rank)
        return tuple(run for rank in range(self.group.size) for run in self.order.runs(rank))

    def prepare(self, device: str) -> None:
        """Connect the transport."""
        super().prepare(device)
        if self.transport == "deepspeed" and self.group.size > 1:
            deepspeed_transport.connect(device)

    def build_kernel(self) -> AttentionKernel:
        """Return the ring; on one rank a loop over chunks."""
        w, sizes = self.workload, SIZES[self.device]
        if self.group.size > 1:
            pieces = ExactPieces(w, self.group.rank, self.order, self._query_runs(), sizes)
            blocks = BlockAttention(self.group, self.exact, pieces)
            return RingKernel(self._exchange(), blocks, self.queries == "full")
        if w.mask is not None:
            return masked_kernel(self.exact, w)
        if self.on_host:
            chunk = self.chunk or sizes.chunk  # keys are copied to the device
            return StreamedKernel(lambda: single_rank_tiles(w, chunk, sizes), self.exact)
        runs = [] if self.chunk else whole_runs(w, sizes)
        calls = [Piece(ALL, ALL, heads, w.causal, is_first=True) for heads in runs]
        # a shortened pass has one, because a call can't be shortened
        whole = SetKernel(self.exact, lambda: limited(calls, 1)) if runs else None
        return TiledKernel(lambda: single_rank_tiles(w, self.chunk, sizes), self.exact, whole)

    def _exchange(self) -> RingExchange:
        sizes = SIZES[self.device]
        limit = self.chunk or sizes.largest_block
        blocks = ring_blocks(self.order.counts, sizes.smallest_block, limit)
        wire = None if self.wire is None else getattr(torch, self.wire)
        hops = self.order.hops if self.queries == "partitioned" else self.group.size - 1
        is_blocking = self.transport == "deepspeed"
        make = deepspeed_transport.DeepspeedRing if is_blocking else RingExchange
        return make(self.group, blocks, hops, wire)

    @override
    def uncompressed(self) -> Ring | None:
        if self.wire is None:
            return None
        uncompressed = object.__new__(type(self))
        vars(uncompressed).update(vars(self), wire=None)
        return uncompressed

    @property
    @override
    def coarsest_dtype(self) -> DType:
        return max(self.workload.dtype, self.wire or self.workload.dtype, key=FINE_TO_COARSE.index)

    @override
    def bytes_sent(self) -> int:
        w, token = self.workload, key_bytes_per_token(self.workload)
        wire = token // w.dtype_bytes * DTYPE_BYTES[self.wire or w.dtype]
        if self.queries == "full":
            return self._exchange().bytes_sent(wire) * (2 if w.train else 1)
        return self._exchange().bytes_sent(wire, token if w.train else 0)

    @override
    def facts(self) -> dict[str, Any]:
        facts = super().facts()
        if self.group.size > 1:
            facts |= {"piece": self._exchange().blocks.longest}
        return facts
