"""The memory of a CUDA device, read from a fake device of 1000 bytes."""

import pytest
import torch

from longseq_bench.meters import cuda_memory
from longseq_bench.meters.base import MeterContext
from longseq_bench.meters.cuda_memory import CudaMemory

MIB = 2**20


@pytest.mark.parametrize(("free", "outside"), [(700, 100), (850, 0)])
def test_memory_outside_the_allocator_is_what_the_device_uses_beyond_it(
    monkeypatch: pytest.MonkeyPatch, free: int, outside: int
) -> None:
    """Never negative: another process may free memory between the two readings."""
    fakes = {
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 50,
        "max_memory_allocated": lambda: 180,
        "memory_reserved": lambda: 200,
        "max_memory_reserved": lambda: 220,
        "memory_stats": dict,
        "mem_get_info": lambda: (free, 1000),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda_memory, "wait_for_device", lambda: None)
    meter = CudaMemory(MeterContext("cuda"))
    with meter:
        pass
    found = {m.name: (m.samples, m.unit) for m in meter.measurements()}
    assert found["outside_allocator"] == ((outside,), "B")
    assert found["device_memory"] == ((1000 - free,), "B")
    assert found["peak"] == ((130,), "B")


@pytest.mark.cuda
def test_the_context_is_outside_the_allocator_and_a_tensor_is_not() -> None:
    meter = CudaMemory(MeterContext("cuda"))

    def outside() -> float:
        return next(m.samples[0] for m in meter.measurements() if m.name == "outside_allocator")

    with meter:
        torch.ones(1, device="cuda")
    before = outside()
    assert before > 50 * MIB
    with meter:
        tensor = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    assert outside() == pytest.approx(before, abs=32 * MIB)
    assert tensor.device.type == "cuda"
