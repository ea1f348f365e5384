"""The memory that counts for a budget on a GPU is that of this process: a fake GPU with several."""

from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest
import torch

from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.meters.memory import CudaMemory
from longseq_bench.meters.own_gpu import OwnGpu
from longseq_bench.worker.memory import FirstPass, limit_cuda, name_other_processes
from longseq_bench.worker.messages import MeasurementLog, samples_of
from longseq_bench.worker.verdicts import outcome_of_exception
from tests import fake_nvml, make
from tests.fake_gpu import CONTEXT, GIB, MIB, Machine, Process
from tests.fake_nvml import FakeGpu, missing

NVML_MISSING = {"nvmlInit": missing(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)}
NO_PERMISSION = {
    "nvmlDeviceGetComputeRunningProcesses": missing(pynvml.NVML_ERROR_NO_PERMISSION),
}
BY_STEPS = "by steps: NVML does not list it"
SOURCES: dict[str, tuple[Callable[[dict[int, int]], Any], dict[str, Any], str]] = {
    "listed": (dict, {}, "by process (NVML)"),
    "hidden": (lambda held: {}, {}, BY_STEPS),
    "no figures": (dict.fromkeys, {}, BY_STEPS),
    "ids of the host": (lambda held: {pid + 9000: n for pid, n in held.items()}, {}, BY_STEPS),
    "an id of another": (
        lambda held: held | {100: 7 * GIB, 200: 7 * GIB}, {},
        "by steps: NVML lists its id for a process of another container",
    ),
    "no permission": (dict, NO_PERMISSION, BY_STEPS),
    "no NVML": (dict, NVML_MISSING, "by steps: NVML: NVML Shared Library Not Found; "
                "600 MiB assumed for a step"),
}  # fmt: skip
sources = pytest.mark.parametrize("source", SOURCES)


def machine(monkeypatch: pytest.MonkeyPatch, source: str = "listed") -> Machine:
    listed, changes, _ = SOURCES[source]
    found = Machine(monkeypatch, listed=listed)
    fake_nvml.install(monkeypatch, found.card, **changes)
    return found


def steps(
    of: Machine, process: Process, need: int, budget: int, ends: list[Outcome]
) -> Iterator[None]:
    """A trial as the worker runs it. Another process may run between any two steps."""
    trial = make.trial(device="cuda", memory_budget=budget)
    attention: Any = type("Attention", (), {"group": Group.alone()})
    sender: Any = type("Sender", (), {"phase": "forward"})
    log = MeasurementLog()
    first = FirstPass(trial, attention, torch.arange(1), sender, log)
    of.run(process)
    process.own.begin(0)
    yield
    of.take(process, outside=CONTEXT)
    of.run(process)
    process.own.opened(0)
    yield
    of.take(process, outside=60 * MIB, reserved=2 * MIB)  # warm-up
    yield
    of.run(process)
    try:
        with first._limit(), CudaMemory() as meter:
            yield
            of.run(process)
            of.take(process, reserved=need)
            yield
            of.run(process)
        log.extend(meter.measurements())
        end = first.over_budget() or Outcome(status="ok")
    except torch.OutOfMemoryError as error:
        end = name_other_processes(outcome_of_exception(error, "forward"), trial)
    ends.append(log.attach_to(end))


def run(of: Machine, *trials: Iterator[None]) -> None:
    """Run trials side by side, a step of each in turn."""
    waiting = list(trials)
    while waiting:
        waiting = [one for one in waiting if next(one, waiting) is None]


@sources
@pytest.mark.parametrize("need", [38 * GIB, 39 * GIB])
def test_two_trials_side_by_side_end_as_each_alone(
    monkeypatch: pytest.MonkeyPatch, source: str, need: int
) -> None:
    """Both under a budget of a little less than half of the GPU."""
    budget, alone, both = 39 * GIB, list[Outcome](), list[Outcome]()
    run(one := machine(monkeypatch, source), steps(one, Process(100), need, budget, alone))
    two = machine(monkeypatch, source)
    run(two, *(steps(two, Process(pid), need, budget, both) for pid in (100, 200)))
    expected = "ok" if need < budget else "oom"
    assert [one.status for one in (*alone, *both)] == [expected] * 3, both
    assert [one.reason for one in both] == [alone[0].reason] * 2
    assert alone[0].facts["memory_counted"] == SOURCES[source][2]
    if expected == "ok":
        (outside,) = samples_of(alone[0].measurements, "outside_allocator")
        assert outside == CONTEXT + 60 * MIB
        assert all(abs(o.samples("outside_allocator")[0] - outside) < GIB for o in both)


@sources
def test_memory_of_others_does_not_count(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """The fault of an H100: a process with 54 GB made a trial under 2 GiB run out of memory."""
    of, ends = machine(monkeypatch, source), list[Outcome]()
    of.processes.append(Process(4242, outside=52 * GIB))
    run(of, steps(of, Process(100), GIB, 2 * GIB, ends))
    assert ends[0].status == "ok"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [("listed", "process 4242 holds 52 GiB"), ("hidden", "other processes hold 52 GiB"),
     ("no NVML", "other processes hold 52 GiB")],
)  # fmt: skip
def test_others_are_named_where_they_left_less_than_the_budget(
    monkeypatch: pytest.MonkeyPatch, source: str, sentence: str
) -> None:
    of, ends = machine(monkeypatch, source), list[Outcome]()
    of.processes.append(Process(4242, outside=52 * GIB))
    run(of, steps(of, Process(100), 30 * GIB, 40 * GIB, ends))
    assert ends[0].status == "oom"
    assert (ends[0].reason or "").endswith(f"; GPU 0 is in use: {sentence}")
    # the budget itself was there, and was too small
    run(of, steps(of, Process(101), 30 * GIB, 4 * GIB, ends))
    assert "in use" not in (ends[1].reason or "")


def test_others_are_named_where_there_is_no_room_for_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, process = machine(monkeypatch), Process(100)
    of.processes.append(Process(4242, outside=80 * GIB))
    of.run(process)
    process.own.begin(0)
    found = outcome_of_exception(RuntimeError("CUDA error: out of memory"), "start")
    named = name_other_processes(found, make.trial(device="cuda", memory_budget=GIB))
    assert (named.reason or "").endswith("; GPU 0 is in use: process 4242 holds 80 GiB")


def test_what_is_taken_in_the_pass_counts_where_nvml_lists_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, process = machine(monkeypatch), Process(100)
    run(of, steps(of, process, GIB, 4 * GIB, []))
    of.take(process, outside=3 * GIB)
    assert process.own.outside() == CONTEXT + 60 * MIB + 3 * GIB
    with pytest.raises(torch.OutOfMemoryError, match="of 3221225472 bytes are in use outside"):
        limit_cuda(3 * GIB)


@pytest.mark.parametrize("taken", [50 * GIB, -50 * GIB])
def test_a_change_by_others_during_the_warm_up_is_left_out(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    of, process, other = machine(monkeypatch, "hidden"), Process(100), Process(7, outside=51 * GIB)
    of.total *= 2
    of.processes.append(other)
    of.run(process)
    process.own.begin(0)
    of.take(process, outside=CONTEXT)
    process.own.opened(0)
    of.take(other, outside=taken)
    process.own.warmed_up(ranks=2)
    assert process.own.outside() == CONTEXT
    assert process.own.way == f"{BY_STEPS}; 0 B assumed for a step"


@pytest.mark.parametrize("uuid", ["GPU-22-aa", "MIG-33-bb"])
def test_the_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    """CUDA may number GPUs by speed, NVML by slot; a slice has an id of its own."""
    of = Machine(monkeypatch, card=FakeGpu("H100", uuid))
    whole = [FakeGpu("A100", "GPU-11", 0, 9, processes={100: 9})]
    whole += [FakeGpu("H100", "GPU-x", 0, 9, slices=[of.card]) if "MIG" in uuid else of.card]
    fake_nvml.install(monkeypatch, *whole)
    of.run(process := Process(100))
    own = OwnGpu()
    own.begin(0)
    of.take(process, outside=CONTEXT)
    own.opened(0)
    assert (own.handle and own.handle.uuid, own.way) == (uuid, "by process (NVML)")
    assert own.outside() == CONTEXT
