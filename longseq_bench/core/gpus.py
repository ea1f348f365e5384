"""The GPUs of this machine, and those that this process may use, by NVML: CUDA is not started.

NVML lists all GPUs of a machine. CUDA shows only those in CUDA_VISIBLE_DEVICES: by index, by UUID,
or by the UUID of a MIG slice (CUDA C++ Programming Guide, "CUDA Environment Variables").
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from longseq_bench.core.units import format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = "NVML finds no GPU"
UNSEEN_BYTES = 2**30
"""More than the driver itself uses. If more memory is in use, and NVML lists no process that holds
it, another process does."""


@dataclass(frozen=True)
class InstalledGpus:
    """All GPUs of this machine in PCI order, or the reason why NVML fails.

    power_limits_w, sm_clocks_mhz: of each GPU now; None where the driver gives no number.
    """

    names: tuple[str, ...] = ()
    driver: str | None = None
    reason: str | None = None
    power_limits_w: tuple[float | None, ...] = ()
    sm_clocks_mhz: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Holder:
    """Another process that uses a GPU.

    held: bytes; None if the driver gives no number.
    """

    pid: int
    held: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one.

    index: of the GPU by NVML.  total, free: bytes; None for a GPU that shares the host's memory.
    unlisted: bytes in use that no process in NVML's list holds.
    """

    index: int
    name: str
    uuid: str
    total: int | None = None
    free: int | None = None
    is_slice: bool = False
    holders: tuple[Holder, ...] = ()
    unlisted: int = 0

    def __str__(self) -> str:
        kind = "MIG slice of GPU" if self.is_slice else "GPU"
        memory = f", {format_bytes(self.total)}" if self.total else ""
        return f"{kind} {self.index}: {self.name}{memory}"

    def in_use_reason(self) -> str | None:
        """Return a sentence on the memory that other processes hold; None if they hold none."""
        kind = f"{'MIG slice of GPU' if self.is_slice else 'GPU'} {self.index}"
        if self.holders:
            held = ", ".join(
                f"process {one.pid} holds "
                + ("an unknown part" if one.held is None else format_bytes(one.held))
                for one in self.holders
            )
            return f"{kind} is in use: {held}"
        if self.unlisted < UNSEEN_BYTES:
            return None
        held = format_bytes(self.unlisted)
        return f"{kind} is in use: processes that can't be seen from here hold {held}"


@dataclass(frozen=True)
class GpuReport:
    """The visible GPUs, in CUDA's order, and the driver.

    driver: its version; None without one.  cuda: the newest CUDA that it supports.
    reason: why no GPU is visible.
    """

    visible: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    reason: str | None = None


def read_installed_gpus() -> InstalledGpus:
    """Return all GPUs of this machine, or the reason why there are none."""
    try:
        with _nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            # a part of a GPU (MIG) has neither
            limits = [_optional(nvml.nvmlDeviceGetPowerManagementLimit, h) for h in handles]
            clocks = [
                _optional(nvml.nvmlDeviceGetClockInfo, h, nvml.NVML_CLOCK_SM) for h in handles
            ]
            return InstalledGpus(
                names=tuple(_text(nvml.nvmlDeviceGetName(h)) for h in handles),
                driver=_text(nvml.nvmlSystemGetDriverVersion()),
                power_limits_w=tuple(None if mw is None else mw / 1000 for mw in limits),
                sm_clocks_mhz=tuple(None if mhz is None else float(mhz) for mhz in clocks),
                reason=None if handles else NO_GPU,
            )
    except _NvmlFailed as error:
        return InstalledGpus(reason=str(error))


def read_visible_gpus(environ: Mapping[str, str] = os.environ) -> GpuReport:
    """Return the GPUs that CUDA would show to this process, or the reason why there are none."""
    try:
        with _nvml() as nvml:
            number = _optional(nvml.nvmlSystemGetCudaDriverVersion)
            cuda = (number // 1000, number % 1000 // 10) if number else None
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            visible, reason = _select(_list_devices(nvml), environ.get(VISIBLE))
            gpus = tuple(_describe(nvml, *one) for one in visible)
            return GpuReport(gpus, driver, cuda, reason)
    except _NvmlFailed as error:
        return GpuReport(reason=str(error))


# ---- reasons -----------------------------------------------------------------------------------


def explain_no_cuda(torch_cuda: str, report: GpuReport) -> tuple[str, str]:
    """Return why torch finds no CUDA device, and what to do.

    torch_cuda: the CUDA version that torch was built for, 13.0.
    """
    if report.driver is None:
        return f"there is no NVIDIA driver: {report.reason}", "install NVIDIA's driver"
    if report.cuda and report.cuda[0] < int(torch_cuda.partition(".")[0]):
        major, minor = report.cuda
        return (
            f"driver {report.driver} is too old for this torch: it supports CUDA {major}.{minor}, "
            f"and torch was built for CUDA {torch_cuda}",
            f"update the driver, or install a torch for CUDA {major}",
        )
    if not report.visible:
        return report.reason or "no GPU is visible", f"set {VISIBLE} to a GPU of nvidia-smi -L"
    return (
        f"torch finds no CUDA device, but driver {report.driver} shows {report.visible[0]}",
        "see what python -c 'import torch; torch.cuda.init()' says",
    )


def unsupported_architecture(
    name: str, capability: tuple[int, int], built_for: Sequence[str]
) -> str | None:
    """Return why a build of torch has no kernels for a GPU; None if it has.

    built_for: as torch.cuda.get_arch_list returns them. Code for sm_80 runs on 8.0 and later minor
    versions, PTX of compute_80 on everything later.
    """
    own = 10 * capability[0] + capability[1]
    for architecture in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", architecture)
        if match is None:
            continue
        number = int(match[2])
        if match[3]:
            fits = number == own
        else:
            fits = number <= own and (match[1] == "compute" or number // 10 == capability[0])
        if fits:
            return None
    return (
        f"this torch has no kernels for {name} (compute capability {capability[0]}."
        f"{capability[1]}); it was built for {', '.join(built_for)}"
    )


# ---- NVML --------------------------------------------------------------------------------------


class _NvmlFailed(Exception):
    """NVML is missing, or a call that must work failed; the message has the reason."""


@dataclass(frozen=True)
class _Device:
    """A GPU of NVML and its MIG slices; in_slices: only these can be used."""

    index: int
    handle: Any
    uuid: str
    in_slices: bool
    slices: tuple[tuple[Any, str], ...]


_Choice = tuple[int, Any, str, bool]
"""Index of the GPU, handle, UUID, whether it is a slice."""


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError as error:
        raise _NvmlFailed(f"NVML can't be imported: {error}") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _NvmlFailed(f"NVML: {error}") from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _NvmlFailed(f"NVML: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _optional(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, or None where this GPU or driver does not support it."""
    import pynvml

    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _list_devices(nvml: Any) -> list[_Device]:
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mode = _optional(nvml.nvmlDeviceGetMigMode, handle)
        in_slices = bool(mode and mode[0])
        count = _optional(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) if in_slices else 0
        own = [
            _optional(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
            for i in range(count or 0)
        ]
        slices = tuple((one, _text(nvml.nvmlDeviceGetUUID(one))) for one in own if one is not None)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        devices.append(_Device(index, handle, uuid, in_slices, slices))
    return devices


def _select(devices: Sequence[_Device], text: str | None) -> tuple[list[_Choice], str | None]:
    """Return the devices that CUDA_VISIBLE_DEVICES names, and why there are none.

    CUDA ignores everything from the first invalid name on, and shows one MIG slice at most.
    """
    if not devices:
        return [], NO_GPU
    names = [str(one.index) for one in devices] if text is None else text.split(",")
    chosen: list[_Choice] = []
    for name in map(str.strip, names):
        found, reason = _find(devices, name)
        if found is None or found[2] in [one[2] for one in chosen]:
            where = "" if text is None else f"{VISIBLE}={text} shows no GPU: "
            return chosen, None if chosen else where + reason
        chosen.append(found)
        if found[3]:
            break
    return chosen, None


def _find(devices: Sequence[_Device], name: str) -> tuple[_Choice | None, str]:
    """Return the device of that name, or the reason why there is none."""
    slices = [(one.index, *own, True) for one in devices for own in one.slices]
    if name.startswith("MIG-"):
        found = [one for one in slices if one[2].startswith(name)]
        return (found[0], "") if len(found) == 1 else (None, f"{len(found)} slices are {name}")
    whole = [
        one
        for one in devices
        if (name == str(one.index) if name.isdigit() else name and one.uuid.startswith(name))
    ]
    if len(whole) != 1:
        return None, f"{len(whole)} GPUs of {len(devices)} are {name or 'named'}"
    (one,) = whole
    if not one.in_slices:
        return (one.index, one.handle, one.uuid, False), ""
    if not one.slices:
        return None, f"GPU {one.index} is in MIG mode, but has no slice"
    return (one.index, *one.slices[0], True), ""


def _describe(nvml: Any, index: int, handle: Any, uuid: str, is_slice: bool) -> Gpu:
    memory = _optional(nvml.nvmlDeviceGetMemoryInfo, handle)
    listed = _optional(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    sizes, own = [one.usedGpuMemory for one in listed], _own_processes()
    is_known = memory is not None and None not in sizes
    return Gpu(
        index, _text(nvml.nvmlDeviceGetName(handle)), uuid,
        total=int(memory.total) if memory else None, free=int(memory.free) if memory else None,
        is_slice=is_slice,
        holders=tuple(Holder(p.pid, p.usedGpuMemory) for p in listed if p.pid not in own),
        unlisted=int(memory.total - memory.free - sum(sizes)) if is_known else 0,
    )  # fmt: skip


def _own_processes() -> set[int]:
    """Return the ids of this process and of those that it started."""
    import psutil

    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
