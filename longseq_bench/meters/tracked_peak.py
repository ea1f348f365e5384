"""Peak of torch's tensors where the kernel has no high-water mark that can be reset (macOS).

It sees every tensor, forward and backward, but not the workspace of a fused kernel.
"""

from typing import Any

import torch
from typing_extensions import override

from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import METERS, ON_CPU, Meter, MeterContext


@METERS.register("tracked-peak")
class TrackedPeak(Meter):
    """Peak bytes of tensors on the CPU that are created while it runs, by torch's MemTracker."""

    name = "tensor peak (MemTracker)"
    role = "memory"
    priority = 20

    @classmethod
    @override
    def unavailable_reason(cls, context: MeterContext = ON_CPU) -> str | None:
        if context.device != "cpu":
            return "measures tensors on the CPU only"
        return "tensors in mapped files don't count for the budget" if context.maps_files else None

    @override
    def start(self) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker

        self._tracker: Any = MemTracker()
        self._tracker.__enter__()

    @override
    def stop(self) -> None:
        self._tracker.__exit__(None, None, None)
        snapshot = self._tracker.get_tracker_snapshot("peak")
        self.peak = int(snapshot.get(torch.device("cpu"), {}).get("Total", 0))

    @override
    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]
