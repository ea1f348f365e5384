"""Time of passes: wall time, CPU time, and on CUDA the device's own events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from typing_extensions import override

from longseq_bench.core.model import Measurement
from longseq_bench.core.ranks import longseq_wait_for_device


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


class Meter(ABC):
    """A context manager around the code that it measures. It may be entered several times.

    name: written to the record.
    """

    name: ClassVar[str]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Begin to measure."""

    @abstractmethod
    def stop(self) -> None:
        """End the measurement."""

    @abstractmethod
    def measurements(self) -> list[Measurement]:
        """Return the results in SI units; of memory with `peak`. Valid after `stop`."""


class Clock(Meter):
    """A meter that adds a sample of wall and CPU seconds; their difference shows load.

    passes: passes that one entry measures; a sample is per pass.
    max_reading_s: the longest time after `split` that a sample leaves out; a longer one counts.
    """

    name = "clock"
    passes = 1
    max_reading_s = 0.0

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @override
    def start(self) -> None:
        self._split: tuple[float, float] | None = None
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def split(self) -> None:
        """Mark the end of the passes: what follows reads their results."""
        self._split = time.perf_counter(), time.process_time()

    @override
    def stop(self) -> None:
        end = time.perf_counter(), time.process_time()
        if self._split and end[0] - self._split[0] <= self.max_reading_s:
            end = self._split
        self.wall.append((end[0] - self._wall) / self.passes)
        self.cpu.append((end[1] - self._cpu) / self.passes)

    @override
    def measurements(self) -> list[Measurement]:
        return [
            Measurement(name="time", unit="s", samples=tuple(self.wall)),
            Measurement(name="cpu_time", unit="s", samples=tuple(self.cpu)),
        ]


class CudaClock(Clock):
    """Device time between two events. The device is idle before and after (warm L2 cache).

    Before the first event the device sleeps for `head_start_s`, in which Python issues the pass:
    otherwise a pass of many short kernels measures the host. dispatch_s: seconds for which the host
    issued the last entry. With several ranks the head start is the same on all of them, so that
    none waits for another one inside its pass.
    """

    name = "CUDA events"

    def __init__(self) -> None:
        super().__init__()
        self.head_start_s, self.dispatch_s = MIN_HEAD_START_S, 0.0

    @override
    def start(self) -> None:
        wait_for_device()
        self._ends: list[Any] = []
        super().start()
        torch.cuda._sleep(round(self.head_start_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
        self._record()

    def _record(self) -> None:
        self._ends.append(torch.cuda.Event(enable_timing=True, blocking=True))  # type: ignore[no-untyped-call]
        self._ends[-1].record()

    @override
    def split(self) -> None:
        self._record()

    @override
    def stop(self) -> None:
        self._record()
        self.dispatch_s = time.perf_counter() - self._wall
        longseq_wait_for_device(self._ends[-1].synchronize)
        super().stop()
        begin, *ends = self._ends
        passes_s, until_s = (begin.elapsed_time(ends[i]) / 1e3 for i in (0, -1))
        is_reading = until_s - passes_s <= self.max_reading_s
        self.wall[-1] = (passes_s if is_reading else until_s) / self.passes


def clock_for(device: str) -> Clock:
    """Return a new clock for passes on a device type."""
    return CudaClock() if device == "cuda" else Clock()
