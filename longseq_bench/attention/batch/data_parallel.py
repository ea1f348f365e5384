"""The batch split over the CUDA devices of one process: torch's DataParallel.

Each pass copies the parameters to every device, scatters the inputs, and gathers the output on the
first device, whose memory limits the length. It is still in use; torch recommends `ddp` instead.
"""

from typing import Annotated

import torch
from typing_extensions import override

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
        inner: Annotated[str, "implementation on each device, with its default options"] = "sdpa",
        devices: Annotated[int | None, "number of CUDA devices; none: all"] = None,
    ) -> None:
        self.devices = devices or max(1, torch.cuda.device_count())
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
        self.module = torch.nn.DataParallel(module, list(range(self.devices)))
