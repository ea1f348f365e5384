"""A fake GPU on which fake processes hold memory, as torch and NVML see it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from longseq_bench.core import gpus
from longseq_bench.meters import memory as meter_module
from longseq_bench.meters.own_gpu import OwnGpu
from longseq_bench.worker import memory
from tests import fake_nvml
from tests.fake_nvml import FakeGpu

GIB, MIB = 2**30, 2**20
CONTEXT = 600 * MIB


@dataclass(eq=False)
class Process:
    """A process and what it holds. sees: how NVML lists it. cap: of torch's allocator."""

    pid: int
    outside: int = 0
    reserved: int = 0
    cap: float = 1.0
    own: OwnGpu = field(default_factory=OwnGpu)


@dataclass(eq=False)
class Machine:
    """One GPU of 80 GiB. listed: what NVML says of processes, from their ids and bytes."""

    patch: pytest.MonkeyPatch
    total: int = 80 * GIB
    listed: Callable[[dict[int, int]], dict[int, int | None]] = dict
    processes: list[Process] = field(default_factory=list)
    card: FakeGpu = field(default_factory=lambda: FakeGpu("H100", "GPU-aa-bb"))

    @property
    def free(self) -> int:
        return self.total - sum(p.outside + p.reserved for p in self.processes)

    def run(self, process: Process) -> None:
        """Let this process run: its id, its allocator, its part of the package."""
        if process not in self.processes:
            self.processes.append(process)
        self._refresh()
        uuid = self.card.uuid.partition("-")[2]
        fakes: dict[str, Any] = {
            "mem_get_info": lambda: (self.free, self.total),
            "memory_reserved": lambda: process.reserved,
            "max_memory_reserved": lambda: process.reserved,
            "memory_allocated": lambda: 0,
            "max_memory_allocated": lambda: process.reserved,
            "reset_peak_memory_stats": lambda: None,
            "memory_stats": dict,
            "empty_cache": lambda: None,
            "is_initialized": lambda: process.outside > 0,
            "current_device": lambda: 0,
            "get_device_properties": lambda number: SimpleNamespace(uuid=uuid),
            "set_per_process_memory_fraction": lambda share: setattr(process, "cap", share),
        }
        for name, fake in fakes.items():
            self.patch.setattr(torch.cuda, name, fake)
        self.patch.setattr(meter_module, "wait_for_device", lambda: None)
        self.patch.setattr(gpus, "os", SimpleNamespace(getpid=lambda: process.pid))
        for module in (memory, meter_module):
            self.patch.setattr(module, "own_gpu", process.own)

    def take(self, process: Process, outside: int = 0, reserved: int = 0) -> None:
        """Allocate, or raise what torch does."""
        allowed = process.cap * self.total - process.reserved
        if reserved > min(allowed, self.free):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {reserved}")
        process.outside += outside
        process.reserved += reserved
        self._refresh()

    def _refresh(self) -> None:
        self.card.free, self.card.total = self.free, self.total
        held = {p.pid: p.outside + p.reserved for p in self.processes if p.outside}
        self.card.processes = self.listed(held)


def refuse(code: int) -> Callable[..., Any]:
    return fake_nvml.missing(code)


NO_PERMISSION, NOT_SUPPORTED = pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_SUPPORTED
