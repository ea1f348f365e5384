"""The batch split over the CUDA devices of one process: torch's DataParallel.

Each pass copies the parameters to every device, scatters the inputs, and gathers the output on the
first device, whose memory bounds the length. Kept because reports still use it; `ddp` is what torch
itself recommends instead.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from longseq_bench.attention.base import implementation
from longseq_bench.attention.batch.ddp import BatchSplit
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@implementation("data-parallel")
class DataParallel(BatchSplit):
    """torch.nn.DataParallel: one process, several devices."""

    summary = "batch split over the CUDA devices of one process (nn.DataParallel)"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        inner: Annotated[str, "the attention of each device, with its default options"] = "sdpa",
        devices: Annotated[int | None, "CUDA devices; none: all there are"] = None,
    ) -> None:
        self.devices = devices or max(1, torch.cuda.device_count())
        super().__init__(workload, group, inner, self.devices)

    @classmethod
    def unavailable_reason(cls, device: str) -> str | None:
        if device == "cuda":
            return None
        return "splits over CUDA devices of one process; on a CPU ddp splits a batch over ranks"

    def prepare(self, device: str) -> None:
        shape = self.workload.model_dump() | {"batch": -(-self.workload.batch // self.devices)}
        self.module = self.make_module(device, Workload.model_validate(shape))
        self._parallel = torch.nn.DataParallel(self.module, list(range(self.devices)))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.workload.train):
            out: Tensor = self._parallel(q, k, v)
        return out

    def projections(self) -> dict[str, Tensor]:
        return dict(self.module.weights.items())
