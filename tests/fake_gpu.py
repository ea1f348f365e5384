"""A fake GPU of 80 GiB on which fake processes hold memory, as torch and NVML see it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longseq_bench.core import gpus
from longseq_bench.meters import memory as meter_module
from longseq_bench.meters.own_gpu import OwnGpu
from longseq_bench.worker import memory
from tests.fake_nvml import FakeGpu

GIB, MIB = 2**30, 2**20
CONTEXT = 600 * MIB


@dataclass(eq=False)
class Process:
    """A process and what it holds. cap: share of the GPU that torch's allocator may take."""

    pid: int
    outside: int = 0
    reserved: int = 0
    cap: float = 1.0
    own: OwnGpu = field(default_factory=OwnGpu)


@dataclass(eq=False)
class Machine:
    """listed: what NVML says of processes, from their ids and bytes."""

    patch: pytest.MonkeyPatch
    total: int = 80 * GIB
    listed: Callable[[dict[int, int]], Any] = dict
    processes: list[Process] = field(default_factory=list)
    card: FakeGpu = field(default_factory=lambda: FakeGpu("H100", "GPU-aa-bb"))

    @property
    def free(self) -> int:
        return self.total - sum(p.outside + p.reserved for p in self.processes)

    def run(self, process: Process) -> None:
        """Let this process run: its id, its allocator, its part of the package."""
        self.processes += [] if process in self.processes else [process]
        self.take(process)
        uuid = self.card.uuid.partition("-")[2]
        fakes: dict[str, Callable[..., Any]] = {
            "mem_get_info": lambda: (self.free, self.total),
            "max_memory_allocated": lambda: process.reserved,
            "memory_stats": dict,
            "is_initialized": lambda: process.outside > 0,
            "get_device_properties": lambda number: SimpleNamespace(uuid=uuid),
            "set_per_process_memory_fraction": lambda share: setattr(process, "cap", share),
        }
        fakes |= dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda: process.reserved)
        fakes |= dict.fromkeys(("memory_allocated", "current_device"), lambda: 0)
        fakes |= dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), lambda: None)
        for name, fake in fakes.items():
            self.patch.setattr(torch.cuda, name, fake)
        self.patch.setattr(meter_module, "wait_for_device", lambda: None)
        self.patch.setattr(gpus, "os", SimpleNamespace(getpid=lambda: process.pid))
        for module in (memory, meter_module):
            self.patch.setattr(module, "own_gpu", process.own)

    def take(self, process: Process, outside: int = 0, reserved: int = 0) -> None:
        """Allocate, or raise what torch does."""
        if reserved > min(process.cap * self.total - process.reserved, self.free):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {reserved}")
        process.outside += outside
        process.reserved += reserved
        self.card.free, self.card.total = self.free, self.total
        held = {p.pid: p.outside + p.reserved for p in self.processes if p.outside}
        self.card.processes = self.listed(held)
