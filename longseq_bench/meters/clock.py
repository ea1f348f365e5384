"""Time of passes: wall time, CPU time, and on CUDA the device's own events."""

import time
from typing import cast

import torch
from typing_extensions import override

from longseq_bench.core.model import Measurement
from longseq_bench.core.ranks import longseq_wait_for_device
from longseq_bench.meters.base import METERS, ON_CPU, Meter, MeterContext, find_meter


def wait_for_device() -> None:
    """Block until the current CUDA device is idle.

    `torch.cuda.synchronize` alone spins on a core. Then a rank that waits for its peers looks busy,
    and a hang looks like a slow pass. So the thread sleeps until the work of the current stream is
    done; the work of other streams is seldom longer.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    longseq_wait_for_device(event.synchronize)
    longseq_wait_for_device(torch.cuda.synchronize)


CYCLES_PER_S = 2e9
"""About the highest clock of a multiprocessor. At a lower clock the device sleeps longer."""

MIN_HEAD_START_S = 1e-3
"""The head start of a clock that knows no dispatch time yet."""


@METERS.register("clock")
class Clock(Meter):
    """Wall and CPU seconds, one sample per entry. The difference of both shows a busy machine.

    passes: passes that one entry measures; a sample is per pass.
    """

    name = "clock"
    role = "time"
    passes = 1

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
        self.cpu.append((time.process_time() - self._cpu) / self.passes)
        self.wall.append((wall - self._wall) / self.passes)

    @override
    def measurements(self) -> list[Measurement]:
        return [
            Measurement(name="time", unit="s", samples=tuple(self.wall)),
            Measurement(name="cpu_time", unit="s", samples=tuple(self.cpu)),
        ]


@METERS.register("cuda-events")
class CudaClock(Clock):
    """Device time between two events. The device is idle before and after (warm L2 cache).

    Before the first event the device sleeps for `head_start_s`, in which Python issues the pass:
    otherwise a pass of many short kernels measures the host. dispatch_s: seconds for which the host
    issued the last entry. With several ranks the head start is the same on all of them, so that
    none waits for another one inside its pass.
    """

    name = "CUDA events"
    priority = 10

    def __init__(self, context: MeterContext = ON_CPU) -> None:
        super().__init__(context)
        self.head_start_s, self.dispatch_s = MIN_HEAD_START_S, 0.0

    @classmethod
    @override
    def unavailable_reason(cls, context: MeterContext = ON_CPU) -> str | None:
        if context.device != "cuda":
            return "measures CUDA devices only"
        return None if torch.cuda.is_available() else "no CUDA device"

    @override
    def start(self) -> None:
        wait_for_device()
        self._events = [
            torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        super().start()
        torch.cuda._sleep(round(self.head_start_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
        self._events[0].record()

    @override
    def stop(self) -> None:
        self._events[1].record()
        self.dispatch_s = time.perf_counter() - self._wall
        longseq_wait_for_device(self._events[1].synchronize)
        super().stop()
        self.wall[-1] = self._events[0].elapsed_time(self._events[1]) / 1e3 / self.passes


def clock_for(device: str) -> Clock:
    """Return a new clock for passes on a device type."""
    return cast("Clock", find_meter("time", MeterContext(device)))
