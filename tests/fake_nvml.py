"""A fake NVML with GPUs, MIG slices and processes of others."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest


@dataclass(eq=False)
class FakeGpu:
    """A GPU or a slice. None: a number that NVML does not support."""

    name: str
    uuid: str
    free: int | None = 200
    total: int | None = 200
    slices: list["FakeGpu"] = field(default_factory=list)
    processes: dict[int, int | None] = field(default_factory=dict)
    power_limit_mw: int | None = 700_000
    sm_clock_mhz: int | None = 345
    reasons: int | None = None


def missing(code: int) -> Any:
    def fail(*_: Any) -> None:
        raise pynvml.NVMLError(code)

    return fail


def install(
    monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, driver: str = "580.1", **changes: Any
) -> None:
    """Replace the functions of NVML that the package calls."""

    def memory(gpu: FakeGpu) -> SimpleNamespace:
        if gpu.total is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(free=gpu.free, total=gpu.total)

    def supported(number: int | None) -> int:
        if number is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return number

    def slice_at(gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.slices[index]

    def processes(gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=b) for pid, b in gpu.processes.items()]

    fakes: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda i: gpus[i],
        "nvmlDeviceGetName": lambda gpu: gpu.name,
        "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_at,
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetPowerManagementLimit": lambda gpu: supported(gpu.power_limit_mw),
        "nvmlDeviceGetClockInfo": lambda gpu, kind: supported(gpu.sm_clock_mhz),
        "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: 1980,
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 61,
        "nvmlDeviceGetPowerUsage": lambda gpu: supported(gpu.power_limit_mw),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: supported(gpu.reasons),
        "nvmlSystemGetDriverVersion": lambda: driver,
    }
    for name, fake in {**fakes, **changes}.items():
        monkeypatch.setattr(pynvml, name, fake)
