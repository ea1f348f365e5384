"""Peak of torch's own tensors where the kernel keeps no mark that can be reset (macOS).

Sees every tensor of torch, forward and backward, but not the workspace of a fused kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import Meter


class TrackedPeak(Meter):
    """Peak bytes of tensors made while it runs, by torch's MemTracker."""

    name = "tensor peak (MemTracker)"

    def start(self) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker

        self._tracker: Any = MemTracker()
        self._tracker.__enter__()

    def stop(self) -> None:
        self._tracker.__exit__(None, None, None)
        snapshot = self._tracker.get_tracker_snapshot("peak")
        self.peak = int(snapshot.get(torch.device("cpu"), {}).get("Total", 0))

    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]
