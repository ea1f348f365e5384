"""Time of passes: wall time, CPU time, and on CUDA the device's own events."""

import time
from typing import cast

import torch
from typing_extensions import override

from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import METERS, ON_CPU, Meter, MeterContext, find_meter


@METERS.register("clock")
class Clock(Meter):
    """Wall and CPU seconds, one sample per entry. The difference of both shows a busy machine."""

    name = "clock"
    role = "time"

    def __init__(self, context: MeterContext = ON_CPU) -> None:
        super().__init__(context)
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @override
    def start(self) -> None:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    @override
    def stop(self) -> None:
        wall = time.perf_counter()
        self.cpu.append(time.process_time() - self._cpu)
        self.wall.append(wall - self._wall)

    @override
    def measurements(self) -> list[Measurement]:
        return [
            Measurement(name="time", unit="s", samples=tuple(self.wall)),
            Measurement(name="cpu_time", unit="s", samples=tuple(self.cpu)),
        ]


@METERS.register("cuda-events")
class CudaClock(Clock):
    """Device time between two events. The device is idle before and after (warm L2 cache)."""

    name = "CUDA events"
    priority = 10

    @classmethod
    @override
    def unavailable_reason(cls, context: MeterContext = ON_CPU) -> str | None:
        if context.device != "cuda":
            return "measures CUDA devices only"
        return None if torch.cuda.is_available() else "no CUDA device"

    @override
    def start(self) -> None:
        torch.cuda.synchronize()
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        super().start()
        self._events[0].record()

    @override
    def stop(self) -> None:
        self._events[1].record()
        self._events[1].synchronize()
        super().stop()
        self.wall[-1] = self._events[0].elapsed_time(self._events[1]) / 1e3


def clock_for(device: str) -> Clock:
    """Return a new clock for passes on a device type."""
    return cast("Clock", find_meter("time", MeterContext(device)))
