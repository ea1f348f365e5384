"""The only loop: a plan asks, a launcher runs, the store keeps, somebody watches.

Resume, progress, dry runs and Ctrl-C live here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from longseq_bench.core.model import Environment, Record, Trial
from longseq_bench.launchers.base import Launcher
from longseq_bench.search.strategy import Plan, Step


class Keeper(Protocol):
    """Where records are found and kept: a Store, or Unkept."""

    def find(self, trial: Trial, fingerprint: str) -> Record | None: ...
    def append(self, record: Record) -> Record: ...


class Unkept:
    """Keeps no record."""

    def find(self, trial: Trial, fingerprint: str) -> Record | None:
        return None

    def append(self, record: Record) -> Record:
        return record


class Watcher:
    """Told what goes on; this one looks away. Subclass for progress."""

    def starts(self, step: Step) -> None:
        """A trial is about to run."""

    def phase(self, phase: str, part: str) -> None:
        """It entered a phase."""

    def ends(self, step: Step, record: Record, found: bool) -> None:
        """Its record is on disk; `found`: it was there already."""


class Watchers(Watcher):
    """Several, told one after the other."""

    def __init__(self, *each: Watcher) -> None:
        self.each = each

    def starts(self, step: Step) -> None:
        for watcher in self.each:
            watcher.starts(step)

    def phase(self, phase: str, part: str) -> None:
        for watcher in self.each:
            watcher.phase(phase, part)

    def ends(self, step: Step, record: Record, found: bool) -> None:
        for watcher in self.each:
            watcher.ends(step, record, found)


def drive(
    plan: Plan,
    launcher: Launcher,
    keeper: Keeper,
    environment: Callable[[], Environment],
    watcher: Watcher | None = None,
    command: str | None = None,
) -> list[Record]:
    """Run a plan to its end and return what it returns.

    Every record is on disk before the plan hears of it. KeyboardInterrupt passes through: the
    trial in flight is ended by its launcher and leaves no record.
    """
    watcher = watcher or Watcher()
    machine = environment()
    record: Record | None = None
    while True:
        try:
            step = plan.send(record) if record is not None else next(plan)
        except StopIteration as done:
            records: list[Record] = done.value
            return records
        record = keeper.find(step.trial, machine.fingerprint)
        found = record is not None
        if record is None:
            watcher.starts(step)
            record = _run(step, launcher, environment(), watcher, command)
            record = keeper.append(record)
        watcher.ends(step, record, found)


def _run(
    step: Step, launcher: Launcher, machine: Environment, watcher: Watcher, command: str | None
) -> Record:
    foreseen = step.foresee()
    started, clock = datetime.now(UTC), time.perf_counter()
    launched = launcher.run(step.trial, watcher.phase)
    return Record(
        trial=step.trial,
        outcome=launched.outcome,
        environment=machine,
        started_at=started.isoformat(timespec="seconds"),
        wall_s=time.perf_counter() - clock,
        processes=launched.processes,
        purpose=step.purpose,
        predicted_tokens=step.predicted_tokens,
        foreseen=foreseen,
        command=command,
    )
