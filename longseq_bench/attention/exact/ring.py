"""Ring attention (arXiv 2310.01889): keys and values pass by in pieces, partial results merge.

Each rank owns n/p rows of q, k, v and of the output. Pieces of keys and values travel round the
ring; the next one is on its way while the one at hand is computed with. So a rank holds its own
rows and a few pieces, whatever the length. On one rank it is the same loop over its own chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from longseq_bench.attention.base import implementation
from longseq_bench.attention.exact import fairscale_shards
from longseq_bench.attention.exact.kv_loop import FullQueries, piece_tokens
from longseq_bench.attention.exact.token_parallel import Sharded
from longseq_bench.attention.projections import Projected, projection_flops
from longseq_bench.attention.tiled import TILE_ROWS
from longseq_bench.core.cost import Cost, dense_cost, key_bytes_per_token
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import DTYPE_BYTES, DType, Workload
from longseq_bench.distributed import deepspeed_transport, kv_exchange
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Name
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.host_streaming import StreamedKernel
from longseq_bench.kernels.tiling import RowBlock

_COARSENESS: tuple[DType, ...] = ("float32", "float16", "bfloat16")


@implementation("ring")
class Ring(Sharded):
    """Exact attention, chunk by chunk, merged by log-sum-exp."""

    summary = "keys and values pass by in pieces, merged by log-sum-exp; exact, memory at the floor"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        chunk: Annotated[int, "keys a step at most, tokens"] = 4 * TILE_ROWS,
        order: Annotated[Name, "which tokens a rank holds"] = "zigzag",
        queries: Annotated[
            Literal["partitioned", "full"], "full: every rank holds all of q, which saves no work"
        ] = "partitioned",
        transport: Annotated[
            Literal["p2p", "deepspeed", "fairscale"],
            "p2p: asynchronous; deepspeed: its blocking send and receive; fairscale: a module with "
            "projections whose parameters its FullyShardedDataParallel shards",
        ] = "p2p",
        wire_dtype: Annotated[
            Literal["float32", "bfloat16", "float16"] | None,
            "what keys and values travel as; none: as they are",
        ] = None,
        offload: Annotated[
            Literal["none", "host"],
            "host: q, k, v and the output lie in the host's memory (pinned; on a CPU a mapped "
            "file) and stream past the device; one rank",
        ] = "none",
    ) -> None:
        self.offload, self.on_host = offload, offload == "host"
        if self.on_host and group.size > 1:
            raise WorldError("offload=host runs on one rank")
        self.chunk, self.queries = chunk, queries
        self.wire: DType | None = wire_dtype if wire_dtype != workload.dtype else None
        self.transport = transport
        if group.size > 1 and (reason := self._missing(workload)):
            raise UnsupportedError(reason)
        super().__init__(workload, group, order)

    def _missing(self, workload: Workload) -> str | None:
        if self.transport == "fairscale":
            return fairscale_shards.unavailable_reason(workload.dtype)
        return deepspeed_transport.unavailable_reason() if self.transport == "deepspeed" else None

    def prepare(self, device: str) -> None:
        super().prepare(device)
        self.device = device
        if self.group.size == 1:
            return
        if self.transport == "deepspeed":
            deepspeed_transport.connect(device)
        if self.transport == "fairscale":
            w = self.workload
            self.module = Projected(super().__call__, w.head_dim, getattr(torch, w.dtype), device)
            self._weights = {n: m.detach().clone() for n, m in self.module.weights.items()}
            self._sharded = fairscale_shards.Sharded(self.module, self.group, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._shards_parameters:
            return super().__call__(q, k, v)
        with torch.set_grad_enabled(self.workload.train):
            return self._sharded(q, k, v)

    def projections(self) -> dict[str, Tensor]:
        return self._weights if self._shards_parameters else {}

    def parameter_gradients(self) -> dict[str, Tensor]:
        if not self._shards_parameters:
            return {}
        return self._sharded.gradients(self.workload.head_dim)

    @property
    def _shards_parameters(self) -> bool:
        return self.transport == "fairscale" and self.group.size > 1

    def build_kernel(self) -> AttentionKernel:
        if self.on_host:
            return StreamedKernel(self.tiles, self.device)
        if self.queries == "full" and self.group.size > 1:
            return FullQueries(self.courier(), self.own_rows())
        return super().build_kernel()

    def courier(self) -> kv_exchange.Ring:
        wire = None if self.wire is None else getattr(torch, self.wire)
        counts = self.counts()
        make = (
            deepspeed_transport.DeepspeedRing if self.transport == "deepspeed" else kv_exchange.Ring
        )
        return make(self.group, counts, piece_tokens(max(counts), self.chunk), wire)

    def rows(self) -> tuple[range, ...]:
        if self.queries == "partitioned":
            return super().rows()
        # all of them, run by run, since a run of rows and one of keys have to have the same step
        return tuple(run for rank in range(self.group.size) for run in self.order.runs(rank))

    def tiles(self) -> Iterator[RowBlock]:
        yield from self.exact_tiles(self.chunk)

    def uncompressed(self) -> Ring:
        """The same, with keys and values travelling as they are."""
        return Ring(
            self.workload,
            self.group,
            chunk=self.chunk,
            order=self.order.name,
            queries=self.queries,
            transport=self.transport,
        )

    @property
    def coarsest_dtype(self) -> DType:
        kinds = (self.workload.dtype, self.wire or self.workload.dtype)
        return max(kinds, key=_COARSENESS.index)

    def cost(self) -> Cost:
        w, whole = self.workload, dense_cost(self.workload)
        token = key_bytes_per_token(w)
        wire = token // w.dtype_bytes * DTYPE_BYTES[self.wire or w.dtype]
        if self.queries == "full":
            sent = self.courier().bytes_sent(wire) * (2 if w.train else 1)
        else:
            sent = self.courier().bytes_sent(wire, token if w.train else 0)
        flops = whole.flops
        if self._shards_parameters:
            elements = 2 * w.batch * w.seq_len * (w.heads + w.kv_heads) * w.head_dim
            flops += projection_flops(elements, w.head_dim, w.train)
            sent += fairscale_shards.bytes_sent(w.head_dim, w.dtype_bytes, self.group.size, w.train)
        return Cost(flops, whole.floor_bytes, sent)

    def facts(self) -> dict[str, Any]:
        here = super().facts() | ({"offload": self.offload} if self.on_host else {})
        return here | {"transport": self.transport} if self.group.size > 1 else here
