"""Count the memory that this process holds on its GPU, by NVML: its budget limits all of it.

by process   NVML says how much each process holds, at any time.
by steps     In containers, with MIG and some drivers it does not. Then the memory in use is read
             before and after the context is made, and after the warm-up, which connects ranks and
             loads libraries. The rises count, what is taken outside the allocator later does not.
"""

import os
from dataclasses import replace

import pynvml as nvml
import torch

from longseq_bench.core.gpus import VISIBLE, Gpu, GpuHandle, list_gpus, visible_gpus
from longseq_bench.core.units import format_bytes

CONTEXT_BYTES, MOST_CONTEXT_BYTES, MOST_BYTES_PER_RANK = 620 * 2**20, 2**30, 2**29
"""CUDA's context on an H100; more than a context takes; more than libraries take (0.1 GiB), or NCCL
for a peer. A higher rise is the doing of other processes."""


class OwnGpu:
    """The GPU of this process. way: how its memory is counted; "" before there is a context."""

    def __init__(self) -> None:
        self.way, self._why = "", "NVML does not say what it holds"
        self.handle: GpuHandle | None = None
        self._gpus: dict[str, GpuHandle] = {}
        self._before: dict[str, Gpu] = {}
        self._added = self._in_use = 0

    def begin(self, number: int) -> None:
        """Read all GPUs, before this process has a context. number: of its GPU, as CUDA counts."""
        try:
            nvml.nvmlInit()  # it stays open as long as the process
            self._gpus = list_gpus()
        except nvml.NVMLError as error:
            self._why = f"NVML: {error}"
            return
        self.handle = dict(enumerate(visible_gpus(self._gpus, os.environ.get(VISIBLE)))).get(number)
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._before = {uuid: gpu.read() for uuid, gpu in self._gpus.items()}

    def opened(self, number: int) -> None:
        """Make the context, and note what it takes."""
        torch.cuda.mem_get_info()
        uuid = str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
        # NVML writes GPU- or MIG- before it, and may have another order than CUDA
        found = (gpu for name, gpu in self._gpus.items() if name.partition("-")[2] == uuid)
        self.handle = next(found, self.handle)
        before = self._before.get(self.handle.uuid) if self.handle else None
        if before and before.own is not None:
            self._why = "NVML lists its id for a process of another container"
        elif self.handle and self.handle.read().own is not None:
            self._why = ""
        self.way = f"by steps: {self._why}" if self._why else "by process (NVML)"
        free, total = self._memory()
        # no rise is as high as all memory
        self._in_use = before.total - (before.free or 0) if before and before.total else -total
        self._added = self._rise(MOST_CONTEXT_BYTES, min(CONTEXT_BYTES, total - free))

    def warmed_up(self, ranks: int) -> None:
        """Note what libraries and connections to other ranks took since the context was made."""
        self._added += self._rise(ranks * MOST_BYTES_PER_RANK, 0)

    def outside(self) -> int:
        """Return the bytes that this process holds outside torch's allocator."""
        held = self.handle.read().own if self.handle and not self._why else None
        return self._added if held is None else max(0, held - torch.cuda.memory_reserved())

    def describe_others(self, budget: int | None) -> str | None:
        """Return a sentence on the memory of other processes, if less is free than the budget."""
        free, total = self._memory()
        held = self.outside() + torch.cuda.memory_reserved() if self.way else 0
        if free + held >= min(budget or total, total):
            return None
        gpu = self.handle.read() if self.handle else Gpu(torch.cuda.current_device(), "", "")
        if self.way and self._why:
            gpu = replace(gpu, holders={}, unlisted=total - free - held)
        return gpu.in_use_reason()

    def _memory(self) -> tuple[int, int]:
        """Return the free and all bytes of the device."""
        gpu = self.handle.read() if self.handle else None
        if gpu and gpu.total:
            return gpu.free or 0, gpu.total
        return torch.cuda.mem_get_info()

    def _rise(self, most: int, otherwise: int) -> int:
        """Return the rise of what is in use outside this allocator since the last reading.

        `otherwise` if it fell, or rose by more than `most`.
        """
        free, total = self._memory()
        in_use = total - free - torch.cuda.memory_reserved()
        rise, self._in_use = in_use - self._in_use, in_use
        if not 0 <= rise <= most:
            self.way += f"; {format_bytes(otherwise)} assumed for a step" if self._why else ""
            rise = otherwise
        return rise


own_gpu = OwnGpu()
"""That of this process."""
