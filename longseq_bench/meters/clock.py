"""Time of passes: wall, processor, and on CUDA the device's own events."""

from __future__ import annotations

import time

import torch

from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import Meter


class Clock(Meter):
    """Wall and CPU seconds of every entry. CPU time beside wall time shows a busy machine."""

    name = "clock"

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def start(self) -> None:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def stop(self) -> None:
        wall = time.perf_counter()
        self.cpu.append(time.process_time() - self._cpu)
        self.wall.append(wall - self._wall)

    def measurements(self) -> list[Measurement]:
        return [
            Measurement(name="time", unit="s", samples=tuple(self.wall)),
            Measurement(name="cpu_time", unit="s", samples=tuple(self.cpu)),
        ]


class CudaClock(Clock):
    """Device time between two events, with the device idle before and after (warm L2)."""

    name = "CUDA events"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device"

    def start(self) -> None:
        torch.cuda.synchronize()
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        super().start()
        self._events[0].record()

    def stop(self) -> None:
        self._events[1].record()
        self._events[1].synchronize()
        super().stop()
        self.wall[-1] = self._events[0].elapsed_time(self._events[1]) / 1e3


def clock_for(device: str) -> Clock:
    """The clock that sees all of a pass on this kind of device."""
    return CudaClock() if device == "cuda" else Clock()
