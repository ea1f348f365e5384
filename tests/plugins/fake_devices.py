"""A launcher with fake GPUs, on which a trial sleeps: for runs with several workers.

FAKE_DEVICES: their number.  FAKE_SECONDS: what FAKE_UNIT tokens sleep; without a unit all trials
sleep as long.  FAKE_FOLDER: has a lock for each device, so that no two trials get the same one.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry
from longseq_bench.core.gpus import VISIBLE
from longseq_bench.core.model import Device, Outcome, Trial
from longseq_bench.launchers.base import LaunchResult, OnPhase
from tests.simulated import SimulatedLauncher


class FakeDevices(SimulatedLauncher):
    """SimulatedLauncher whose trials sleep on devices of their own."""

    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        gpus = DeviceInfo(name="fake GPU", dtypes=("float32",), count=len(self.devices("cuda")))
        names = ("ring", "sdpa", "ulysses")
        return Catalogue(
            implementations={name: Entry(summary="") for name in names},
            devices={"cpu": DeviceInfo(name="simulated"), "cuda": gpus},
        )

    def devices(self, device: Device) -> list[str]:
        return [f"fake-{i}" for i in range(int(os.environ.get("FAKE_DEVICES", "8")))]

    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        with ExitStack() as held:
            for name in os.environ.get(VISIBLE, "").split(",")[: trial.world_size]:
                if name and not held.enter_context(_lock(name)):
                    return LaunchResult(Outcome(status="error", reason=f"{name} is given twice"))
            result = super().run(trial, on_phase)
            tokens, unit = trial.workload.seq_len, os.environ.get("FAKE_UNIT")
            share = tokens / int(unit) if unit else 1.0
            time.sleep(share * float(os.environ.get("FAKE_SECONDS", "0")))
        return result


@contextmanager
def _lock(device: str) -> Iterator[bool]:
    with open(Path(os.environ["FAKE_FOLDER"]) / device, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
