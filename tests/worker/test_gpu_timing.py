"""Timing on a GPU: warm clocks, a head start for the host, several short passes a sample.

The device is a fake: a queue of work in seconds, and events that note when they are reached.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longseq_bench.distributed.group import Group
from longseq_bench.meters import clock as clock_module
from longseq_bench.meters.clock import CYCLES_PER_S, MIN_HEAD_START_S, CudaClock
from longseq_bench.worker.timing import passes_of_a_sample, prepare_clocks
from tests.ranks import Ranks


class Device:
    """A stream that works behind the host. now_s: the host's time; done_s: the stream's last work.

    log: what the host did, in order.
    """

    def __init__(self) -> None:
        self.now_s = self.done_s = 0.0
        self.log: list[str] = []

    def launch(self, seconds: float, dispatch_s: float = 0.0) -> None:
        self.now_s += dispatch_s
        self.done_s = max(self.done_s, self.now_s) + seconds

    def sleep(self, cycles: int) -> None:
        self.log.append("sleep")
        self.launch(cycles / CYCLES_PER_S)

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.done_s)

    def event(self, enable_timing: bool = False, blocking: bool = False) -> Any:
        device, self.blocking = self, blocking

        class Event:
            at_s = 0.0

            def record(self) -> None:
                device.log.append("event" if enable_timing else "waits")
                self.at_s = max(device.done_s, device.now_s)

            def synchronize(self) -> None:
                assert blocking, "the host would spin on a core"
                device.wait()

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * float(end.at_s - self.at_s)

        return Event()


def install(patch: Callable[..., None]) -> Device:
    device = Device()
    patch(torch.cuda, "Event", device.event)
    patch(torch.cuda, "_sleep", device.sleep)
    patch(torch.cuda, "synchronize", lambda: device.wait())
    host = SimpleNamespace(perf_counter=lambda: device.now_s, process_time=lambda: device.now_s)
    patch(clock_module, "time", host)
    return device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch.setattr)


# ---- the clock ---------------------------------------------------------------------------------


def test_the_time_in_which_the_host_issues_a_pass_is_hidden(device: Device) -> None:
    """Ten kernels of 10 µs that the host issues in 50 µs each take 100 µs, not 510 µs."""
    clock = CudaClock()
    with clock:
        for _ in range(10):
            device.launch(10e-6, dispatch_s=50e-6)
    assert clock.wall == [pytest.approx(100e-6)]
    assert clock.dispatch_s == pytest.approx(500e-6)
    assert device.log == ["waits", "sleep", "event", "event"]


def test_a_sample_of_several_passes_is_their_mean(device: Device) -> None:
    clock = CudaClock()
    clock.passes = 4
    with clock:
        for seconds in (1e-4, 2e-4, 3e-4, 4e-4):
            device.launch(seconds)
    assert clock.wall == [pytest.approx(2.5e-4)]
    assert clock.cpu == [pytest.approx((MIN_HEAD_START_S + 1e-3) / 4)]


@pytest.mark.parametrize(("reading_s", "seconds"), [(5e-6, 1e-4), (3e-4, 4e-4)])
def test_reading_results_counts_if_it_takes_long(
    device: Device, reading_s: float, seconds: float
) -> None:
    clock = CudaClock()
    clock.max_reading_s = 1e-4
    with clock:
        device.launch(1e-4)
        clock.split()
        device.launch(reading_s)
    assert clock.wall == [pytest.approx(seconds)]


# ---- before the first timed pass ---------------------------------------------------------------


def prepare(
    device: Device, pass_s: float, dispatch_s: float, can_batch: bool = True, group: Any = None
) -> CudaClock:
    """Return a clock that was prepared by passes of these seconds."""

    def time_pass(clock: CudaClock) -> None:
        device.log.append("pass")
        with clock:
            device.launch(pass_s, dispatch_s)

    clock = CudaClock()
    prepare_clocks([clock], time_pass, group or Group.alone(), can_batch)
    assert clock.wall == []
    return clock


@pytest.mark.parametrize(("pass_s", "passes"), [(0.3, 1), (0.001, 100)])
def test_the_device_is_busy_for_200_ms(device: Device, pass_s: float, passes: int) -> None:
    prepare(device, pass_s, 1e-5)
    assert device.log.count("pass") == passes


@pytest.mark.parametrize(("pass_s", "passes"), [(1e-3, 1), (0.9e-3, 2), (0.0, 50)])
def test_a_sample_takes_a_millisecond(pass_s: float, passes: int) -> None:
    assert passes_of_a_sample(pass_s) == passes


@pytest.mark.parametrize(
    ("dispatch_s", "can_batch", "passes", "head_start_s"),
    [(1e-5, True, 10, MIN_HEAD_START_S), (5e-4, True, 10, 6e-3), (2e-3, False, 1, 2.4e-3)],
)
def test_the_head_start_covers_all_passes_of_a_sample(
    device: Device, dispatch_s: float, can_batch: bool, passes: int, head_start_s: float
) -> None:
    clock = prepare(device, 1.05e-4, dispatch_s, can_batch)
    assert (clock.passes, clock.head_start_s) == (passes, pytest.approx(head_start_s))


# ---- timed passes ------------------------------------------------------------------------------


def prepare_on_rank(group: Group) -> tuple[int, int, float]:
    """Prepare a clock on a rank whose passes take longer the higher its number."""
    with pytest.MonkeyPatch.context() as patch:
        device = install(patch.setattr)
        slowness = 1 + group.rank
        clock = prepare(device, 1.05e-4 * slowness, 1e-3 * slowness, group=group)
    return device.log.count("pass"), clock.passes, clock.head_start_s


def test_all_ranks_have_the_passes_and_the_head_start_of_the_slowest(ranks: Ranks) -> None:
    first, second = ranks(2, prepare_on_rank)
    assert first == second
    assert first[1:] == (5, pytest.approx(1.2 * 2e-3 * 5))
