"""The meters of memory and the clocks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longseq_bench.meters import memory
from longseq_bench.meters.clock import Clock
from longseq_bench.meters.memory import CudaMemory, HeapPeak, StoragePeak, memory_meter


def work() -> None:
    torch.ones(2**20).mul_(2)


@pytest.mark.parametrize(
    ("make", "names", "samples"),
    [(HeapPeak, {"peak": "B"}, 1), (lambda: StoragePeak("cpu"), {"peak": "B"}, 1),
     (Clock, {"time": "s", "cpu_time": "s"}, 2)],
)  # fmt: skip
def test_a_meter_can_be_entered_again_and_stops_when_the_code_raises(
    make: Callable[[], Any], names: dict[str, str], samples: int
) -> None:
    """A memory meter measures the last entry; a clock adds a sample per entry."""
    if make is HeapPeak and (reason := HeapPeak.unavailable_reason()):
        pytest.skip(reason)
    meter = make()
    with pytest.raises(ZeroDivisionError), meter:
        raise ZeroDivisionError
    with meter as entered:
        work()
    assert entered is meter
    found = meter.measurements()
    assert {m.name: m.unit for m in found} == names
    assert {len(m.samples) for m in found} == {samples}
    assert all(math.isfinite(s) and s >= 0 for m in found for s in m.samples)


def test_mapped_files_are_measured_by_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of mapped files are resident, but don't count for the budget."""
    assert isinstance(memory_meter("cpu", True, lambda *_: 0), StoragePeak)
    assert isinstance(memory_meter("cuda", False, lambda *_: 0), CudaMemory)
    monkeypatch.setattr(HeapPeak, "unavailable_reason", lambda: None)
    assert isinstance(memory_meter("cpu", False, lambda *_: 0), HeapPeak)
    monkeypatch.setattr(HeapPeak, "unavailable_reason", lambda: "not here")
    assert isinstance(memory_meter("cpu", False, lambda *_: 0), StoragePeak)


@pytest.mark.cuda
def test_the_context_is_outside_the_allocator_and_a_tensor_is_not() -> None:
    meter = CudaMemory()
    memory.own_gpu.begin(0)
    memory.own_gpu.opened(0)

    def outside() -> float:
        return next(m.samples[0] for m in meter.measurements() if m.name == "outside_allocator")

    with meter:
        torch.ones(1, device="cuda")
    before = outside()
    assert before > 50 * 2**20
    with meter:
        tensor = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    assert outside() == pytest.approx(before, abs=2**25)
    assert tensor.device.type == "cuda"
