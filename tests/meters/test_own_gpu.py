"""The memory that counts for a budget on a GPU is that of this process: a fake GPU with several."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from longseq_bench.core import gpus
from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.meters import memory as meter_module
from longseq_bench.meters.own_gpu import OwnGpu
from longseq_bench.worker import memory
from longseq_bench.worker.messages import MeasurementLog
from longseq_bench.worker.verdicts import outcome_of_exception
from tests import fake_nvml, make
from tests.fake_nvml import FakeGpu, missing

GIB, MIB = 2**30, 2**20
CONTEXT, LIBRARIES = 600 * MIB, 60 * MIB

FORBIDDEN = {"nvmlDeviceGetComputeRunningProcesses": missing(pynvml.NVML_ERROR_NO_PERMISSION)}
NVML_MISSING = {"nvmlInit": missing(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)}
UNLISTED = "by steps: NVML does not say what it holds"
SOURCES: dict[str, tuple[Callable[[dict[int, int]], Any], dict[str, Any], str]] = {
    "listed": (dict, {}, "by process (NVML)"),
    "hidden": (lambda held: {}, {}, UNLISTED),
    "no figures": (dict.fromkeys, {}, UNLISTED),
    "ids of the host": (lambda held: {pid + 9000: n for pid, n in held.items()}, {}, UNLISTED),
    "an id of another": (
        lambda held: held | {100: 7 * GIB, 200: 7 * GIB}, {},
        "by steps: NVML lists its id for a process of another container",
    ),
    "no permission": (dict, FORBIDDEN, UNLISTED),
    "no NVML": (
        dict, NVML_MISSING,
        "by steps: NVML: NVML Shared Library Not Found; 600 MiB assumed for a step",
    ),
}  # fmt: skip
"""What NVML says of processes, from their ids and bytes, and what the record says then."""
sources = pytest.mark.parametrize("source", SOURCES)


@dataclass(eq=False)
class Process:
    """A process and what it holds. cap: share of the GPU that torch's allocator may take."""

    pid: int
    outside: int = 0
    reserved: int = 0
    cap: float = 1.0
    own: OwnGpu = field(default_factory=OwnGpu)


class Machine:
    """A GPU of 80 GiB, as torch and NVML see it. Process 4242 holds some bytes of it."""

    def __init__(self, patch: pytest.MonkeyPatch, source: str = "listed", others: int = 0) -> None:
        self.listed, changes, _ = SOURCES[source]
        self.patch, self.card = patch, FakeGpu("H100", "GPU-aa-bb")
        self.processes = [Process(4242, others)]
        fake_nvml.install(patch, self.card, **changes)

    def memory(self) -> tuple[int, int]:
        return 80 * GIB - sum(p.outside + p.reserved for p in self.processes), 80 * GIB

    def run(self, process: Process, outside: int = 0, reserved: int = 0) -> OwnGpu:
        """Let this process run: its id, its allocator, its part of the package; and allocate."""
        self.processes += [] if process in self.processes else [process]
        uuid = SimpleNamespace(uuid=self.card.uuid.partition("-")[2])
        fakes: dict[str, Callable[..., Any]] = {
            "mem_get_info": self.memory,
            "memory_stats": dict,
            "is_initialized": lambda: process.outside > 0,
            "get_device_properties": lambda number: uuid,
            "set_per_process_memory_fraction": lambda share: setattr(process, "cap", share),
        }
        held = "memory_reserved", "max_memory_reserved", "max_memory_allocated"
        fakes |= dict.fromkeys(held, lambda: process.reserved)
        fakes |= dict.fromkeys(("memory_allocated", "current_device"), lambda: 0)
        fakes |= dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), lambda: None)
        for name, fake in fakes.items():
            self.patch.setattr(torch.cuda, name, fake)
        self.patch.setattr(meter_module, "wait_for_device", lambda: None)
        self.patch.setattr(gpus, "os", SimpleNamespace(getpid=lambda: process.pid))
        for module in (memory, meter_module):
            self.patch.setattr(module, "own_gpu", process.own)
        free, total = self.memory()
        if reserved > min(process.cap * total - process.reserved, free):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {reserved}")
        process.outside += outside
        process.reserved += reserved
        self.card.free, self.card.total = self.memory()
        listed = {p.pid: p.outside + p.reserved for p in self.processes if p.outside}
        self.card.processes = self.listed(listed)
        return process.own

    def trial(self, process: Process, need: int, budget: int) -> Iterator[Outcome | None]:
        """A trial as the worker runs it; the last is its outcome. Others may run in between."""
        one = make.trial(device="cuda", memory_budget=budget)
        attention: Any = SimpleNamespace(group=Group.alone())
        sender: Any = SimpleNamespace(phase="forward")
        first = memory.FirstPass(one, attention, torch.arange(1), sender, MeasurementLog())
        self.run(process).begin(0)
        yield None
        self.run(process, outside=CONTEXT).opened(0)
        yield None
        self.run(process, outside=LIBRARIES, reserved=2 * MIB)  # warm-up
        try:
            with first._limit(), meter_module.CudaMemory() as meter:
                yield None
                self.run(process, reserved=need)
                yield None
                self.run(process)
            first.log.extend(meter.measurements())
            end = first.over_budget() or Outcome(status="ok")
        except torch.OutOfMemoryError as error:
            end = memory.name_other_processes(outcome_of_exception(error, "forward"), one)
        yield first.log.attach_to(end)


def run(*trials: Iterator[Outcome | None]) -> list[Outcome]:
    """Run trials side by side, a step of each in turn."""
    return [one for one in list(zip(*trials, strict=True))[-1] if one]


@sources
@pytest.mark.parametrize("need", [38 * GIB, 39 * GIB])
def test_two_trials_side_by_side_end_as_each_alone(
    monkeypatch: pytest.MonkeyPatch, source: str, need: int
) -> None:
    """Both under a budget of a little less than half of the GPU."""
    (alone,) = run(Machine(monkeypatch, source).trial(Process(100), need, 39 * GIB))
    two = Machine(monkeypatch, source)
    both = run(*(two.trial(Process(pid), need, 39 * GIB) for pid in (100, 200)))
    assert [(one.status, one.reason) for one in both] == [(alone.status, alone.reason)] * 2
    assert alone.facts["memory_counted"] == SOURCES[source][2]
    assert alone.status == ("ok" if need < 39 * GIB else "oom")
    if alone.status == "ok":
        assert alone.samples("outside_allocator") == (CONTEXT + LIBRARIES,)
        assert alone.samples("peak") == (need + 2 * MIB,)


@sources
def test_others_do_not_count_and_are_named_where_they_leave_too_little(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The fault of an H100: a process with 54 GB made a trial under 2 GiB run out of memory."""
    ok, small, full = (
        run(Machine(monkeypatch, source, 52 * GIB).trial(Process(100), need * GIB, budget * GIB))[0]
        for need, budget in ((1, 2), (5, 4), (30, 40))
    )
    assert [one.status for one in (ok, small, full)] == ["ok", "oom", "oom"], ok.reason
    assert "in use" not in (small.reason or "")  # its budget was there
    seen = "process 4242 holds" if source == "listed" else "processes that can't be seen from here"
    assert f"; GPU 0 is in use: {seen}" in (full.reason or "")


def test_others_are_named_where_there_is_no_room_for_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch, others=80 * GIB).run(Process(100)).begin(0)
    found = outcome_of_exception(RuntimeError("CUDA error: out of memory"), "start")
    named = memory.name_other_processes(found, make.trial(device="cuda", memory_budget=GIB))
    assert (named.reason or "").endswith("; GPU 0 is in use: process 4242 holds 80 GiB")


def test_what_a_pass_takes_outside_counts_where_nvml_lists_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, process = Machine(monkeypatch), Process(100)
    run(of.trial(process, GIB, 4 * GIB))
    assert of.run(process, outside=3 * GIB).outside() == CONTEXT + LIBRARIES + 3 * GIB
    with pytest.raises(torch.OutOfMemoryError, match="of 3221225472 bytes are in use outside"):
        memory.limit_cuda(3 * GIB)


@pytest.mark.parametrize("taken", [20 * GIB, -20 * GIB])
def test_a_change_by_others_during_the_warm_up_is_left_out(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    of, process = Machine(monkeypatch, "hidden", others=40 * GIB), Process(100)
    first = of.trial(process, GIB, 4 * GIB)
    next(first), next(first)
    of.run(of.processes[0], outside=taken)
    own = of.run(process)
    own.warmed_up(ranks=2)
    assert (own.outside(), own.way) == (CONTEXT, f"{UNLISTED}; 0 B assumed for a step")


@pytest.mark.parametrize("uuid", ["GPU-22-aa", "MIG-33-bb"])
def test_the_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    """CUDA may number GPUs by speed, NVML by slot; a slice has an id of its own."""
    of, process = Machine(monkeypatch), Process(100)
    of.card.uuid = uuid
    second = FakeGpu("H100", "GPU-x", slices=[of.card]) if "MIG" in uuid else of.card
    fake_nvml.install(monkeypatch, FakeGpu("A100", "GPU-11", 0, 9, processes={100: 9}), second)
    own = of.run(process)
    own.begin(0)
    of.run(process, outside=CONTEXT).opened(0)
    assert own.handle
    assert (own.handle.uuid, own.way, own.outside()) == (uuid, "by process (NVML)", CONTEXT)
