"""The batch split over ranks (ddp), or over the CUDA devices of one process (data-parallel).

ddp is torch's DistributedDataParallel (arXiv 2006.15704): every rank computes its rows of the
batch, full sequences, with the same parameters; their gradients are averaged over ranks. A batch
smaller than the number of ranks is refused: there is no speed-up.

data-parallel is torch's DataParallel: each pass copies the parameters to every device, scatters the
inputs, and gathers the output on the first device, whose memory limits the length. It is still in
use; torch recommends ddp instead.
"""

from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from longseq_bench.attention.base import IMPLEMENTATIONS, implementation
from longseq_bench.attention.projections import Projected, ProjectedAttention, parameter_bytes
from longseq_bench.core.errors import UserError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Shard, even_span

_REFUSED_INNER = ("ddp", "data-parallel", "block-sparse-multihead", "block-sparse-adaptive")
"""They split a batch, have projections, or choose a pattern from all of the batch."""


class BatchSplit(ProjectedAttention):
    """A batch split into parts; each part goes through a module around an inner attention."""

    takes_masks = True  # if the inner attention does

    def __init__(self, workload: Workload, group: Group, inner: str, parts: int) -> None:
        if workload.batch < parts:
            raise WorldError(
                f"a batch of {workload.batch} can't be split into {parts} parts: "
                "each rank or device needs at least one sequence"
            )
        if inner in _REFUSED_INNER:
            raise UserError(f"inner={inner} can't run on a part of the batch; choose sdpa or ring")
        self._make = IMPLEMENTATIONS.get(inner)
        self.inner = self._make(workload, Group.alone())
        super().__init__(workload, group)

    def build_module(self, device: str, batch: int) -> Projected:
        """Return the module for `batch` sequences; its inner attention is prepared."""
        super().prepare(device)
        w = self.workload.model_copy(update={"batch": batch})
        attention = self._make(w, Group.alone())
        attention.prepare(device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.group.computes:
                return attention(q, k, v)
            return q * (k.flatten()[0] + v.flatten()[0])

        self.inner = attention
        module = Projected(attend, w.head_dim, self.torch_dtype, device)
        self.weights = module.weights
        return module


@implementation("ddp")
class Ddp(BatchSplit):
    """Batch split over ranks by DistributedDataParallel."""

    summary = "batch split over ranks, gradients of parameters averaged (DistributedDataParallel)"
    many_ranks = True
    takes_sinks = True  # if the inner attention does

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        inner: Annotated[str, "implementation on each rank, with its default options"] = "sdpa",
    ) -> None:
        super().__init__(workload, group, inner, group.size)

    @override
    def build_shard(self) -> Shard:
        own = range(*even_span(self.workload.batch, self.group.size, self.group.rank))
        return replace(Shard.full(self.workload), batch=own)

    def prepare(self, device: str) -> None:
        """Build the module; over several ranks inside DistributedDataParallel."""
        self.module = self.build_module(device, len(self.shard.batch))
        if self.group.size > 1:
            parallel = DistributedDataParallel(self.module, process_group=self.group.data)
            # DDP checks the annotations of a hook; a lambda has none
            parallel.register_comm_hook(self.group, lambda group, bucket: _average(group, bucket))
            self.module = parallel

    @override
    def parameter_gradients(self) -> dict[str, Tensor]:
        # DDP averages over ranks; this returns the sum
        return {n: grad * self.group.size for n, grad in super().parameter_gradients().items()}

    @override
    def bytes_sent(self) -> int:
        w = self.workload
        nbytes = parameter_bytes(w.head_dim, w.dtype_bytes)
        return _all_reduce_bytes(nbytes, self.group.size) if w.train else 0


def _average(group: Group, bucket: Any) -> Future[Tensor]:
    """Average gradients over ranks as DDP does by default.

    The sent bytes are counted. Nothing is sent while computation alone is timed.
    """
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
    """Return the bytes that a rank sends in a ring all-reduce: 2 · (size - 1) / size of them."""
    return 2 * nbytes * (size - 1) // size


@implementation("data-parallel")
class DataParallel(BatchSplit):
    """torch.nn.DataParallel: one process, several devices."""

    summary = "batch split over the CUDA devices of one process (nn.DataParallel)"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        inner: Annotated[str, "implementation on each device, with its default options"] = "sdpa",
    ) -> None:
        self.devices = max(1, torch.cuda.device_count())
        super().__init__(workload, group, inner, self.devices)

    @classmethod
    @override
    def unavailable_reason(cls, device: str) -> str | None:
        if device == "cuda":
            return None
        return "needs CUDA devices; on a CPU use ddp, which splits the batch over ranks"

    def prepare(self, device: str) -> None:
        """Build the module for the share of one device."""
        module = self.build_module(device, -(-self.workload.batch // self.devices))
        self.module = torch.nn.DataParallel(module)
