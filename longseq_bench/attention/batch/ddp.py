"""The batch split over ranks: torch's DistributedDataParallel (arXiv 2006.15704).

Every rank computes whole sequences of its rows of the batch with the same parameters, whose
gradients are averaged over ranks. A batch smaller than the ranks can't be split: nothing would be
faster, so it is refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from longseq_bench.attention.base import (
    IMPLEMENTATIONS,
    Attention,
    Counts,
    Positions,
    implementation,
)
from longseq_bench.attention.projections import Projected, parameter_bytes, projection_flops
from longseq_bench.core.cost import Cost, floor_bytes
from longseq_bench.core.errors import UserError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import even

SPREADS = ("ddp", "data-parallel")
MODULES = ("block-sparse-multihead",)


class BatchSplit(Attention):
    """A batch split into parts, each through a module round an inner attention."""

    def __init__(self, workload: Workload, group: Group, inner: str, parts: int) -> None:
        if workload.batch < parts:
            raise WorldError(
                f"a batch of {workload.batch} can't be split over {parts}: "
                "each needs a row of it, and nothing would be faster"
            )
        if inner in SPREADS:
            raise UserError(f"inner={inner} splits a batch itself; name an attention")
        if inner in MODULES:
            raise UserError(f"inner={inner} has projections itself; name an attention without")
        self.inner = inner
        self._whole = IMPLEMENTATIONS.get(inner)(workload, Group.alone())
        super().__init__(workload, group)

    def own_workload(self) -> Workload:
        """That of this rank's rows."""
        shape = self.workload.model_dump() | {"batch": len(self.shard.batch)}
        return Workload.model_validate(shape)

    def make_module(self, device: str, workload: Workload) -> Projected:
        """The module, its inner attention planned."""
        w = workload
        attention = IMPLEMENTATIONS.get(self.inner)(w, Group.alone())
        attention.prepare(device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.group.computes:
                return attention(q, k, v)
            return q * (k.flatten()[0] + v.flatten()[0])

        self._attention = attention
        return Projected(attend, w.head_dim, getattr(torch, w.dtype), device)

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self._whole.multiplicity(q_positions, k_positions, head)

    def cost(self) -> Cost:
        w = self.workload
        elements = 2 * w.batch * w.seq_len * (w.heads + w.kv_heads) * w.head_dim
        flops = self._whole.cost().flops + projection_flops(elements, w.head_dim, w.train)
        return Cost(flops, floor_bytes(w), self.bytes_by_formula())

    def bytes_by_formula(self) -> int:
        """What a rank sends in one pass."""
        return 0

    def measures(self) -> dict[str, float]:
        return self._whole.measures()

    def facts(self) -> dict[str, Any]:
        return self._attention.facts() | {"module": "projections of q, k, v and out"}


@implementation("ddp")
class Ddp(BatchSplit):
    """DistributedDataParallel."""

    summary = "batch split over ranks, parameters' gradients averaged (DistributedDataParallel)"
    many_ranks = True

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        inner: Annotated[str, "the attention of each rank, with its default options"] = "sdpa",
    ) -> None:
        super().__init__(workload, group, inner, group.size)

    def _shard(self) -> Shard:
        whole = Shard.full(self.workload)
        mine = range(*even(self.workload.batch, self.group.size, self.group.rank))
        return Shard(mine, whole.heads, whole.kv_heads, whole.queries, whole.keys)

    def prepare(self, device: str) -> None:
        self.module = self.make_module(device, self.own_workload())
        self._parallel: torch.nn.Module = self.module
        if self.group.size > 1:
            parallel = DistributedDataParallel(self.module, process_group=self.group.data)
            # DDP refuses a hook whose annotations are not its own
            parallel.register_comm_hook(self.group, lambda group, bucket: _average(group, bucket))
            self._parallel = parallel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.workload.train):
            out: Tensor = self._parallel(q, k, v)
        return out

    def projections(self) -> dict[str, Tensor]:
        return dict(self.module.weights.items())

    def parameter_gradients(self) -> dict[str, Tensor]:
        # averaged over ranks, by DDP
        return {n: grad * self.group.size for n, grad in super().parameter_gradients().items()}

    def bytes_by_formula(self) -> int:
        w, size = self.workload, self.group.size
        if not w.train:
            return 0
        return _all_reduce_bytes(parameter_bytes(w.head_dim, w.dtype_bytes), size)


def _average(group: Group, bucket: Any) -> Future[Tensor]:
    """What DDP does by default, with its bytes counted, and left out where only computing is
    timed."""
    gradients = bucket.buffer().div_(group.size)
    if not group.traffic.communicates:
        ready: Future[Tensor] = Future()
        ready.set_result(gradients)
        return ready
    group.traffic.bytes_sent += _all_reduce_bytes(gradients.nbytes, group.size)
    work: Any = dist.all_reduce(gradients, group=group.data, async_op=True)
    summed: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


def _all_reduce_bytes(nbytes: int, size: int) -> int:
    """A ring all-reduce sends each part but its own twice."""
    return 2 * nbytes * (size - 1) // size
