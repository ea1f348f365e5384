"""Memory of a CUDA device: allocated and reserved by the caching allocator, and device-wide.

The device-wide figures are sums over all processes: in a container, NVML gives no figure per
process. `outside_allocator` is what a budget counts and no peak: CUDA contexts, NCCL buffers,
workspaces and code of libraries.
"""

import torch
from typing_extensions import override

from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import METERS, ON_CPU, Meter, MeterContext
from longseq_bench.meters.device_wait import wait_for_device


@METERS.register("cuda-memory")
class CudaMemory(Meter):
    """Peak bytes above the level at the start, allocator retries, fragmentation."""

    name = "CUDA allocator"
    role = "memory"
    priority = 30

    @classmethod
    @override
    def unavailable_reason(cls, context: MeterContext = ON_CPU) -> str | None:
        if context.device != "cuda":
            return "measures CUDA devices only"
        return None if torch.cuda.is_available() else "no CUDA device"

    @override
    def start(self) -> None:
        wait_for_device()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    @override
    def stop(self) -> None:
        wait_for_device()
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        self._bytes = {
            "peak": torch.cuda.max_memory_allocated() - self._before,
            "reserved": torch.cuda.max_memory_reserved(),
            "device_memory": total - free,
            # now, not at the peak: both figures are of the same moment
            "outside_allocator": max(0, total - free - torch.cuda.memory_reserved()),
            "inactive_split": stats.get("inactive_split_bytes.all.peak", 0),
        }
        self.retries = int(stats.get("num_alloc_retries", 0))

    @override
    def measurements(self) -> list[Measurement]:
        return [
            *(Measurement(name=n, unit="B", samples=(b,)) for n, b in self._bytes.items()),
            Measurement(name="alloc_retries", unit="1", samples=(self.retries,)),
        ]
