"""The trials of a run: one after the other, or on several workers side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from longseq_bench.api import machine
from longseq_bench.api.shards import part_seconds, split_parts
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Device, Record, Trial
from longseq_bench.environment import collect
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.workers import Workers
from longseq_bench.runner import Watcher, run_schedule, run_side_by_side
from longseq_bench.search.strategy import Schedule
from longseq_bench.store import Store

MakeSchedule = Callable[[Sequence[Trial], Launcher], Schedule]


@dataclass(frozen=True)
class Run:
    """The trials of a run, and who runs them.

    make_schedule: of some of the trials, on a launcher.  is_search: they are searches for lengths.
    workers: how many run trials side by side.  devices: those that they share out.
    """

    trials: Sequence[Trial]
    make_schedule: MakeSchedule
    launcher: Launcher
    is_search: bool = False
    workers: int = 1
    devices: Sequence[str] = ()

    def start(self, store: Store | None, watcher: Watcher, command: str | None) -> list[Record]:
        """Run all trials and return their records, in an order that the workers don't change.

        Trials that are compared are one part, which one worker runs; the longest part starts first.
        """
        parts = list(split_parts(self.trials, self.is_search).values())
        count = min(self.workers, len(parts))
        if self.workers < 2 or not parts:
            schedule = self.make_schedule(self.trials, self.launcher)
            return run_schedule(schedule, self.launcher, store, collect, watcher, command)
        seconds = [part_seconds(part, self.is_search) for part in parts]
        order = sorted(range(len(parts)), key=lambda i: -seconds[i])
        schedules = [partial(self.make_schedule, part) for part in parts]
        device, each = self.trials[0].device, len(self.devices) // self.workers
        environment = partial(collect, self.workers, each if device == "cpu" else None)
        devices = self.devices[: count * each]  # also a shard with few parts leaves the others free
        with Workers(count, device, devices, machine.launcher_name()) as workers:
            return run_side_by_side(schedules, order, workers, store, environment, watcher, command)


def cpu_workers(workers: int | str | None, device: Device) -> int:
    """Return how many trials share the memory of the host: auto is one on a CPU."""
    text = str(workers)
    return max(1, int(text)) if device == "cpu" and text.isdecimal() else 1


def choose_workers(
    workers: int | str | None, trials: Sequence[Trial], launcher: Launcher
) -> tuple[int, Sequence[str]]:
    """Return how many workers run trials side by side, and the devices that they share out.

    workers: a number; auto: on GPUs as many as have devices for the largest world, on a CPU one.
    Raises UserError for a number that the devices or the trials don't allow.
    """
    text = str(workers or 1)
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise UserError(f"--workers {text}: write auto, or a number from 1")
    if text == "1" or not trials:
        return 1, ()
    kinds, ranks = {t.device for t in trials}, max(t.world_size for t in trials)
    if machine.runs_on_hosts() or len(kinds) > 1:
        problem = "longseq launch" if machine.runs_on_hosts() else "trials on both cpu and cuda"
        raise UserError(f"--workers is for one kind of device of one host, not for {problem}")
    if any(t.options.get("offload", "none") != "none" for t in trials):
        both = "--workers and offload=host exclude each other"
        raise UserError(f"{both}: trials would wait for the same memory of the host")
    (device,) = kinds
    devices = launcher.devices(device)
    fits = len(devices) // ranks if device == "cuda" else len(devices)
    if text == "auto":
        return max(1, fits if device == "cuda" else 1), devices
    if int(text) > fits:
        has = f"{len(devices)} {'GPU' if device == 'cuda' else 'core'}{'s' * (len(devices) > 1)}"
        world = f", and world_size {ranks} needs {ranks} GPUs" * (device == "cuda" and ranks > 1)
        raise UserError(
            f"--workers {text}: this machine shows {has}{world}; use at most {max(1, fits)}"
        )
    return int(text), devices
