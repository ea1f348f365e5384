"""`longseq sweep` in processes of its own, all of which can be found."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "LONGSEQ_TEST_RUN"
"""A variable that every process of a command inherits, so that what it leaves can be told."""

PATIENCE_S = 90
SOON_S = 10


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the running processes with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


@dataclass
class Sweep:
    """A sweep in a process group of its own, and every process that came of it."""

    process: subprocess.Popen[bytes]
    mark: str
    said: Path

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.mark)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < end, self.said.read_text()
            time.sleep(0.02)

    def left(self) -> list[str]:
        """What is still there some seconds later."""
        end = time.monotonic() + SOON_S
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        return [" ".join(process.cmdline()) for process in self.processes()]

    def end(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait()


def start_sweep(
    said: Path, before: Sequence[str] = (), mark: str = "", after: Sequence[str] = (),
    **variables: str,
) -> Sweep:  # fmt: skip
    """Start `longseq sweep sweep.yaml --out out` in the current folder; `said` is its stderr.

    before, after: arguments of longseq before `sweep`, and at the end.  mark: that of another node
    of the same launch.
    """
    mark = mark or uuid.uuid4().hex
    command = [sys.executable, "-m", "longseq_bench", *before, "sweep", "sweep.yaml"]
    with said.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--out", "out", *after], env={**os.environ, MARK: mark, **variables},
            stdout=subprocess.DEVNULL, stderr=stream, start_new_session=True,
        )  # fmt: skip
    return Sweep(process, mark, said)
