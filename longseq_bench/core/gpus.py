"""The GPUs of this machine, and those that this process may use, by NVML: CUDA is not started.

NVML lists all GPUs of a machine. CUDA shows only those in CUDA_VISIBLE_DEVICES: by index or UUID,
also of a MIG slice (CUDA C++ Programming Guide, "CUDA Environment Variables").
Beside it is what Triton needs to compile kernels for them.
"""

import ctypes
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pynvml as nvml

from longseq_bench.core.files import load_table
from longseq_bench.core.units import format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = "NVML finds no GPU"
UNSEEN_BYTES = 2**30
"""More than the driver itself uses. If more memory is in use, and NVML lists no process that holds
it, another process does."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one.

    index: of the GPU by NVML.  total, free: bytes; None for a GPU that shares the host's memory.
    holders: bytes that each other process holds, by its id; None if the driver gives no number.
    own: bytes that this process holds; None if it is not in NVML's list, or without a number.
    unlisted: bytes in use that no process in NVML's list holds.
    """

    index: int
    name: str
    uuid: str
    total: int | None = None
    free: int | None = None
    holders: Mapping[int, int | None] = field(default_factory=dict)
    own: int | None = None
    unlisted: int = 0

    def __str__(self) -> str:
        memory = f", {format_bytes(self.total)}" if self.total else ""
        return f"GPU {self.index}: {self.name}{memory}"

    def in_use_reason(self) -> str | None:
        """Return a sentence on the memory that other processes hold; None if they hold none."""
        if self.holders:
            held = ", ".join(
                f"process {pid} holds {'an unknown part' if held is None else format_bytes(held)}"
                for pid, held in self.holders.items()
            )
            return f"GPU {self.index} is in use: {held}"
        if self.unlisted < UNSEEN_BYTES:
            return None
        held = format_bytes(self.unlisted)
        return f"GPU {self.index} is in use: processes that can't be seen from here hold {held}"


POWER_LIMIT = "power limit"
_LIMITS = {0x40: "heat", 0x20: "heat", 0x80: "power brake", 0x08: "hardware", 0x04: POWER_LIMIT}
"""What lowers the SM clock, by NVML's bits. The power limit (by software) is normal: an H100 that
multiplies matrices is always at it, so the share of the highest clock, by which nvbench judges,
shows nothing. A power brake comes from the power supply. The user's own settings are left out."""


@dataclass(frozen=True)
class Clocks:
    """SM clock of a GPU, with temperature and power; 0 where the driver gives no number."""

    sm_mhz: float
    highest_mhz: float
    celsius: float
    watts: float
    limits: tuple[str, ...]

    @property
    def slowdown(self) -> str:
        """The reason why times at this clock are not to be trusted, or ""."""
        return next((name for name in self.limits if name != POWER_LIMIT), "")


@dataclass(frozen=True)
class GpuReport:
    """The GPUs of this machine by NVML.

    visible: those that CUDA shows to this process, in CUDA's order.  reason: why there are none.
    driver: its version; None without one.
    shared: sentences on what visible GPUs share, so that they may slow each other down.
    names, power_limits_w, sm_clocks_mhz: of every GPU in PCI order; None where the driver gives no
    number.
    """

    visible: tuple[Gpu, ...] = ()
    driver: str | None = None
    reason: str | None = None
    shared: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    power_limits_w: tuple[float | None, ...] = ()
    sm_clocks_mhz: tuple[float | None, ...] = ()


def read_visible_gpus(environ: Mapping[str, str] = os.environ) -> GpuReport:
    """Return the GPUs, and those that CUDA would show to this process."""
    try:
        nvml.nvmlInit()
        try:
            return _read_gpus(environ.get(VISIBLE))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return GpuReport(reason=f"NVML: {error}")


@dataclass(frozen=True)
class GpuHandle:
    """A GPU, or a MIG slice of one, as NVML knows it. index, whole: of the GPU of a slice."""

    index: int
    handle: Any
    uuid: str
    whole: Any

    def read(self, own: Collection[int] = ()) -> Gpu:
        """Return its memory now, and the processes that hold it. own: ids that are no others'."""
        memory = optional(nvml.nvmlDeviceGetMemoryInfo, self.handle)
        listed = optional(nvml.nvmlDeviceGetComputeRunningProcesses, self.handle) or []
        held = {one.pid: one.usedGpuMemory for one in listed}
        is_known = memory is not None and None not in held.values()
        return Gpu(
            self.index,
            optional(nvml.nvmlDeviceGetName, self.handle) or "GPU",
            self.uuid,
            total=int(memory.total) if memory else None,
            free=int(memory.free) if memory else None,
            holders={pid: size for pid, size in held.items() if pid not in {os.getpid(), *own}},
            own=held.get(os.getpid()),
            unlisted=int(memory.total - memory.free - sum(held.values())) if is_known else 0,
        )

    def read_clocks(self) -> Clocks | None:
        """Return the clocks now; None if the driver gives none."""
        gpu = self.whole
        if not (mhz := optional(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM)):
            return None
        bits = optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu) or 0
        return Clocks(
            mhz,
            optional(nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM) or 0,
            optional(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU) or 0,
            (optional(nvml.nvmlDeviceGetPowerUsage, gpu) or 0) / 1000,
            tuple(name for bit, name in _LIMITS.items() if bits & bit),
        )


def list_gpus() -> dict[str, GpuHandle]:
    """Return the GPUs by index and UUID, and the slices of those in MIG mode. NVML has to be open.

    The index of such a GPU is its first slice, as CUDA has it.
    """
    gpus: dict[str, GpuHandle] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        if (whole := optional(nvml.nvmlDeviceGetHandleByIndex, index)) is None:
            continue  # a GPU that is lost
        count = optional(nvml.nvmlDeviceGetMaxMigDeviceCount, whole) or 0
        slice_at = nvml.nvmlDeviceGetMigDeviceHandleByIndex
        slices = [optional(slice_at, whole, i) for i in range(count)]
        for one in list(filter(None, slices)) or [whole]:
            uuid = nvml.nvmlDeviceGetUUID(one)
            gpus[uuid] = GpuHandle(index, one, uuid, whole)
            gpus.setdefault(str(index), gpus[uuid])
    return gpus


def visible_gpus(gpus: Mapping[str, GpuHandle], names: str | None) -> list[GpuHandle]:
    """Return the GPUs that CUDA shows, in its order. names: value of CUDA_VISIBLE_DEVICES."""
    visible = []
    for name in filter(str.isdigit, gpus) if names is None else names.split(","):
        # CUDA ignores everything from the first invalid name on
        if (gpu := gpus.get(name.strip())) is None:
            break
        visible.append(gpu)
    return visible


def _read_gpus(visible_names: str | None) -> GpuReport:
    gpus = list_gpus()
    handles = [gpu.whole for name, gpu in gpus.items() if name.isdigit()]
    # a part of a GPU (MIG) has neither
    limits = [optional(nvml.nvmlDeviceGetPowerManagementLimit, h) for h in handles]
    clocks = [optional(nvml.nvmlDeviceGetClockInfo, h, nvml.NVML_CLOCK_SM) for h in handles]
    visible = visible_gpus(gpus, visible_names)
    reason = f"{VISIBLE}={visible_names} shows no GPU of {len(handles)}" if handles else NO_GPU
    own = [child.pid for child in psutil.Process().children(recursive=True)] if visible else []
    return GpuReport(
        tuple(gpu.read(own) for gpu in visible),
        driver=nvml.nvmlSystemGetDriverVersion(),
        reason=None if visible else reason,
        shared=tuple(_find_shared({gpu.index: gpu.whole for gpu in visible})),
        names=tuple(nvml.nvmlDeviceGetName(h) for h in handles),
        power_limits_w=tuple(None if mw is None else mw / 1000 for mw in limits),
        sm_clocks_mhz=tuple(None if mhz is None else float(mhz) for mhz in clocks),
    )


def _find_shared(gpus: Mapping[int, Any]) -> Iterator[str]:
    """Yield what pairs of GPUs share, of which these are the handles by index."""
    for (one, first), (other, second) in combinations(gpus.items(), 2):
        level = optional(nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
        if level == nvml.NVML_TOPOLOGY_INTERNAL:
            yield f"GPUs {one} and {other} are on one board, with one power limit"
        elif level == nvml.NVML_TOPOLOGY_SINGLE:
            yield f"GPUs {one} and {other} are on one PCIe switch"


def explain_broken_gpu(text: str) -> str | None:
    """Return a sentence if a text names an error of the GPU itself, of which a trial dies."""
    errors = load_table("errors.yaml")["broken_gpu"].items()
    found = next((words for error, words in errors if re.search(error, text)), None)
    return found and f"{found}; look for Xid in the kernel's log (dmesg), and reset it or reboot"


def load_cudnn(maps: Path = Path("/proc/self/maps")) -> None:
    """Load the parts of cuDNN that its first call loads, if a GPU is visible.

    Only a call opens a GPU, so a process that does this may still be forked.
    """
    # those beside the one that torch has loaded: of another version they would not fit
    mapped = re.search(r"(/.*)/libcudnn\.so", maps.read_text())
    if mapped and read_visible_gpus().visible:
        for file in sorted(Path(mapped[1]).glob("libcudnn_[egh]*.so.*")):
            ctypes.CDLL(str(file))


def optional(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call of NVML, or None where this GPU or driver does not support it."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def python_header() -> Path:
    """Return the path that Python.h should have."""
    # Debian's default scheme names a folder without headers; Triton avoids it too
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_path("include", scheme)) / "Python.h"
