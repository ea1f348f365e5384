"""The memory that counts for a budget on a GPU is that of this process: a fake GPU with several."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.meters.memory import CudaMemory
from longseq_bench.worker.memory import FirstPass, limit_cuda, name_other_processes
from longseq_bench.worker.messages import MeasurementLog
from longseq_bench.worker.verdicts import outcome_of_exception
from tests import fake_nvml, make
from tests.fake_gpu import CONTEXT, GIB, MIB, Machine, Process
from tests.fake_nvml import FakeGpu, missing

NVML_MISSING = {"nvmlInit": missing(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)}
FORBIDDEN = {"nvmlDeviceGetComputeRunningProcesses": missing(pynvml.NVML_ERROR_NO_PERMISSION)}
UNLISTED = "by steps: NVML does not list it"
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
sources = pytest.mark.parametrize("source", SOURCES)


def machine(patch: pytest.MonkeyPatch, source: str = "listed", **others: int) -> Machine:
    listed, changes, _ = SOURCES[source]
    found = Machine(patch, listed=listed, processes=[Process(4242, **others)])
    fake_nvml.install(patch, found.card, **changes)
    return found


def steps(of: Machine, process: Process, need: int, budget: int) -> Iterator[Outcome | None]:
    """A trial as the worker runs it; its outcome is the last. Others may run between two steps."""
    one = make.trial(device="cuda", memory_budget=budget)
    attention: Any = SimpleNamespace(group=Group.alone())
    sender: Any = SimpleNamespace(phase="forward")
    first = FirstPass(one, attention, torch.arange(1), sender, MeasurementLog())
    of.run(process)
    process.own.begin(0)
    yield None
    of.take(process, outside=CONTEXT)
    of.run(process)
    process.own.opened(0)
    yield None
    of.take(process, outside=60 * MIB, reserved=2 * MIB)  # warm-up
    yield None
    of.run(process)
    try:
        with first._limit(), CudaMemory() as meter:
            yield None
            of.run(process)
            of.take(process, reserved=need)
            yield None
            of.run(process)
        first.log.extend(meter.measurements())
        end = first.over_budget() or Outcome(status="ok")
    except torch.OutOfMemoryError as error:
        end = name_other_processes(outcome_of_exception(error, "forward"), one)
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
    budget = 39 * GIB
    (alone,) = run(steps(machine(monkeypatch, source), Process(100), need, budget))
    two = machine(monkeypatch, source)
    both = run(*(steps(two, Process(pid), need, budget) for pid in (100, 200)))
    assert alone.status == ("ok" if need < budget else "oom")
    assert [(one.status, one.reason) for one in both] == [(alone.status, alone.reason)] * 2
    assert alone.facts["memory_counted"] == SOURCES[source][2]
    if need < budget:
        assert alone.samples("outside_allocator") == (CONTEXT + 60 * MIB,)


@sources
def test_memory_of_others_does_not_count(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """The fault of an H100: a process with 54 GB made a trial under 2 GiB run out of memory."""
    of = machine(monkeypatch, source, outside=52 * GIB)
    (found,) = run(steps(of, Process(100), GIB, 2 * GIB))
    assert found.status == "ok", found.reason


@pytest.mark.parametrize(
    ("source", "holder"),
    [("listed", "process 4242 holds"), ("hidden", "processes that can't be seen from here hold"),
     ("no NVML", "processes that can't be seen from here hold")],
)  # fmt: skip
def test_others_are_named_where_they_left_less_than_the_budget(
    monkeypatch: pytest.MonkeyPatch, source: str, holder: str
) -> None:
    of = machine(monkeypatch, source, outside=52 * GIB)
    (found,) = run(steps(of, Process(100), 30 * GIB, 40 * GIB))
    assert found.status == "oom"
    assert (found.reason or "").endswith(f"; GPU 0 is in use: {holder} 52 GiB")
    # the budget itself was there, and was too small
    (found,) = run(steps(of, Process(101), 30 * GIB, 4 * GIB))
    assert (found.status, "in use" in (found.reason or "")) == ("oom", False)


def test_others_are_named_where_there_is_no_room_for_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, process = machine(monkeypatch, outside=80 * GIB), Process(100)
    of.run(process)
    process.own.begin(0)
    found = outcome_of_exception(RuntimeError("CUDA error: out of memory"), "start")
    named = name_other_processes(found, make.trial(device="cuda", memory_budget=GIB))
    assert (named.reason or "").endswith("; GPU 0 is in use: process 4242 holds 80 GiB")


def test_what_a_pass_takes_outside_counts_where_nvml_lists_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, process = machine(monkeypatch), Process(100)
    run(steps(of, process, GIB, 4 * GIB))
    of.take(process, outside=3 * GIB)
    assert process.own.outside() == CONTEXT + 60 * MIB + 3 * GIB
    with pytest.raises(torch.OutOfMemoryError, match="of 3221225472 bytes are in use outside"):
        limit_cuda(3 * GIB)


@pytest.mark.parametrize("taken", [20 * GIB, -20 * GIB])
def test_a_change_by_others_during_the_warm_up_is_left_out(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    of, process = machine(monkeypatch, "hidden", outside=40 * GIB), Process(100)
    first = steps(of, process, GIB, 4 * GIB)
    next(first), next(first)
    of.take(of.processes[0], outside=taken)
    process.own.warmed_up(ranks=2)
    assert process.own.outside() == CONTEXT
    assert process.own.way == f"{UNLISTED}; 0 B assumed for a step"


@pytest.mark.parametrize("uuid", ["GPU-22-aa", "MIG-33-bb"])
def test_the_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    """CUDA may number GPUs by speed, NVML by slot; a slice has an id of its own."""
    of, process = Machine(monkeypatch, card=FakeGpu("H100", uuid)), Process(100)
    second = FakeGpu("H100", "GPU-x", slices=[of.card]) if "MIG" in uuid else of.card
    fake_nvml.install(monkeypatch, FakeGpu("A100", "GPU-11", 0, 9, processes={100: 9}), second)
    of.run(process)
    process.own.begin(0)
    of.take(process, outside=CONTEXT)
    process.own.opened(0)
    assert (process.own.handle and process.own.handle.uuid) == uuid
    assert (process.own.way, process.own.outside()) == ("by process (NVML)", CONTEXT)
