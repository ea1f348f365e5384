"""Meters of memory: a CUDA device, the heap of a Linux process, and torch's tensors.

`outside_allocator` is what a budget counts and no peak: the CUDA context, NCCL buffers, workspaces
and code of libraries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from longseq_bench import meta_mode
from longseq_bench.core.model import Measurement
from longseq_bench.meters.clock import Meter as Meter
from longseq_bench.meters.clock import wait_for_device
from longseq_bench.meters.own_gpu import own_gpu

Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that an operator, given its arguments, allocates outside torch's tensors while it runs."""


def memory_meter(
    device: str, maps_files: bool, workspace: Workspace, data_limit: int | None = None
) -> Meter:
    """Return the meter for a pass on a device.

    maps_files: if the inputs are in memory-mapped files: their pages are resident too, and don't
    count for the budget.  workspace: bytes that an operator allocates where no tensor shows it.
    data_limit: bytes of the heap above which an allocation fails, if the system enforces a limit.
    """
    if device == "cuda":
        return CudaMemory()
    if maps_files or HeapPeak.unavailable_reason():
        return StoragePeak(device, workspace)
    return HeapPeak(data_limit)


class CudaMemory(Meter):
    """Peak bytes above the level at the start, bytes outside the allocator, allocator retries."""

    name = "CUDA allocator"

    @override
    def start(self) -> None:
        wait_for_device()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    @override
    def stop(self) -> None:
        wait_for_device()
        self._bytes = {
            "peak": torch.cuda.max_memory_allocated() - self._before,
            "reserved": torch.cuda.max_memory_reserved(),
            "outside_allocator": own_gpu.outside(),  # now, not at the peak
        }
        self.retries = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    @override
    def measurements(self) -> list[Measurement]:
        return [
            *(Measurement(name=n, unit="B", samples=(b,)) for n, b in self._bytes.items()),
            Measurement(name="alloc_retries", unit="1", samples=(self.retries,)),
        ]


# ---- the heap, from the kernel's high-water mark (VmHWM) -----------------------------------------
# Writing `5` to /proc/self/clear_refs resets VmHWM to the resident size. The peak is the rise of
# the mark above that. It is close only while glibc returns every larger block at once, which
# worker/memory.py arranges. With glibc's default thresholds it reads three times too much.
#
# What remains is a few hundred KiB: the kernel counts resident pages in batches of 32 or more per
# core, and a page that was mapped before the start may be written later. An enforced data limit is
# exact, so no peak above it is reported.

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class HeapPeak(Meter):
    """Peak bytes above the level at the start. kept: bytes that are not freed at the end."""

    name = "heap peak (VmHWM)"

    def __init__(self, data_limit: int | None = None) -> None:
        self._data_limit = data_limit

    @staticmethod
    def unavailable_reason() -> str | None:
        """Return why the peak can't be measured here, or None."""
        try:
            _CLEAR_REFS.write_text("5")
        except OSError as error:
            return f"the kernel's high-water mark can't be reset: {error.strerror or error}"
        return None

    @override
    def start(self) -> None:
        _CLEAR_REFS.write_text("5")
        self._before = status_bytes("VmRSS")
        self._files = status_bytes("RssFile")

    @override
    def stop(self) -> None:
        # code that runs for the first time becomes resident too, but is not allocated
        code = max(0, status_bytes("RssFile") - self._files)
        peak, limit = max(0, status_bytes("VmHWM") - self._before - code), self._data_limit
        self.peak = peak if limit is None else min(peak, limit)
        self.kept = max(0, status_bytes("VmRSS") - self._before - code)

    @override
    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]


def status_bytes(field: str) -> int:
    """Return a kB field of /proc/self/status, in bytes. Raises KeyError if there is none."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


# ---- torch's tensors by their storages, on any device, `meta` included ---------------------------
# Every operation of forward and backward is counted when it is dispatched. A storage counts from
# the operation that created it until its last reference is gone. The workspace of a fused kernel is
# not visible; `workspace` gives its size.


class StoragePeak(Meter):
    """Peak bytes of storages that are created while it runs, on one type of device.

    current: bytes now. peak_workspace: the part of the peak that is a kernel's workspace.
    peak_indices: the part of the peak that is tensors of integers, such as the lists of a layout.
    most_indices: bytes of such tensors, and of all, when there were most of them.
    """

    name = "tensor peak (storages)"

    def __init__(self, device: str, workspace: Workspace | None = None) -> None:
        self._device, self._workspace = device, workspace

    @override
    def start(self) -> None:
        self.current = self.peak = self.peak_workspace = 0
        self._indices = self.peak_indices = 0
        self.most_indices = (0, 0)
        self._known: set[int] = set()
        self._mode: Any = _Watch(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    @override
    def stop(self) -> None:
        self._mode.__exit__(None, None, None)

    @override
    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]

    def add_operation(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Count the new storages among an operator's outputs, and its workspace."""
        for tensor in _tensors(output):
            if tensor.device.type == self._device:
                storage = tensor.untyped_storage()
                if not meta_mode.is_off_device(storage):
                    self._add_storage(storage, not tensor.dtype.is_floating_point)
        workspace = self._workspace(op, args, kwargs) if self._workspace else 0
        if self.current + workspace > self.peak:
            self.peak, self.peak_workspace = self.current + workspace, workspace
            self.peak_indices = self._indices
        self.most_indices = max(self.most_indices, (self._indices, self.current + workspace))

    def _add_storage(self, storage: Any, is_index: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.current += size
        self._indices += size if is_index else 0
        weakref.finalize(storage, self._remove_storage, key, size, is_index)

    def _remove_storage(self, key: int, size: int, is_index: bool) -> None:
        self._known.discard(key)
        self.current -= size
        self._indices -= size if is_index else 0


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, meter: StoragePeak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch imports its compiler at the first call
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._meter.add_operation(func, args, kwargs or {}, output)
        return output


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
