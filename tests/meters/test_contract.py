"""The contract of every registered meter, also of plug-ins; the memory of a CUDA device."""

import math
from collections.abc import Iterator

import pytest
import torch

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Measurement
from longseq_bench.meters import memory
from longseq_bench.meters.base import METERS, Meter, MeterContext, available_meters, find_meter
from longseq_bench.meters.clock import Clock
from longseq_bench.meters.memory import CudaMemory

CONTEXTS = [MeterContext("cpu", maps_files=mapped) for mapped in (False, True)]
CONTEXTS += [MeterContext("cuda"), MeterContext("meta")]
UNITS = {"s", "B", "J", "W", "FLOP", "1"}
each = pytest.mark.parametrize("name", METERS.names())


def build(name: str) -> Meter:
    """Build a meter for the first context in which it can measure."""
    make = METERS.get(name)
    for context in CONTEXTS:
        if make.unavailable_reason(context) is None:
            return make(context)
    pytest.skip(str(make.unavailable_reason()))


def work() -> None:
    torch.ones(2**20).mul_(2)


@each
def test_it_has_a_name_a_role_and_reasons(name: str) -> None:
    make = METERS.get(name)
    assert make.name
    assert make.role in ("memory", "time", "extra")
    for context in CONTEXTS:
        reason = make.unavailable_reason(context)
        assert reason is None or (reason and "\n" not in reason)


@each
def test_results_are_finite_and_in_si_units(name: str) -> None:
    meter = build(name)
    with meter as entered:
        work()
    assert entered is meter
    found = meter.measurements()
    assert found
    for measurement in found:
        assert measurement.unit in UNITS
        assert measurement.samples
        assert all(math.isfinite(s) and s >= 0 for s in measurement.samples)


@each
def test_it_can_be_entered_again(name: str) -> None:
    """A memory meter measures the last entry; any other adds a sample per entry."""
    meter = build(name)
    for _ in range(3):
        with meter:
            work()
    expected = 1 if meter.role == "memory" else 3
    assert {len(m.samples) for m in meter.measurements()} == {expected}


@each
def test_it_stops_when_the_measured_code_raises(name: str) -> None:
    meter = build(name)
    with pytest.raises(ZeroDivisionError), meter:
        raise ZeroDivisionError
    with meter:
        work()
    assert meter.measurements()


@each
def test_a_memory_meter_reports_a_peak_and_a_time_meter_is_a_clock(name: str) -> None:
    meter = build(name)
    with meter:
        work()
    names = {m.name for m in meter.measurements()}
    if meter.role == "memory":
        assert "peak" in names
    if meter.role == "time":
        assert isinstance(meter, Clock)
        assert {"time", "cpu_time"} <= names


# ---- choice of the meter -----------------------------------------------------------------------


class Fixed(Meter):
    name = "fixed"
    role = "memory"
    priority = 99

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(1.0,))]


@pytest.fixture
def registered() -> Iterator[None]:
    METERS.names()
    METERS.register("fixed-for-a-test")(Fixed)
    yield
    del METERS._objects["fixed-for-a-test"]


def test_the_available_meter_with_the_highest_priority_is_used(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(find_meter("memory", MeterContext()), Fixed)
    monkeypatch.setattr(Fixed, "unavailable_reason", classmethod(lambda cls, context: "not here"))
    assert not isinstance(find_meter("memory", MeterContext()), Fixed)


def test_mapped_files_are_measured_by_storages() -> None:
    """Pages of mapped files are resident, but don't count for the budget."""
    assert type(find_meter("memory", MeterContext(maps_files=True))).__name__ == "StoragePeak"


def test_a_role_without_a_meter_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METERS, "names", list)
    assert available_meters("extra", MeterContext()) == []
    with pytest.raises(UnsupportedError, match="no memory meter can measure on device=cpu"):
        find_meter("memory", MeterContext())


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
    monkeypatch.setattr(memory, "wait_for_device", lambda: None)
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
    assert before > 50 * 2**20
    with meter:
        tensor = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    assert outside() == pytest.approx(before, abs=2**25)
    assert tensor.device.type == "cuda"
