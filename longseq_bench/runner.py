"""The run loop: the schedule requests a trial, the launcher runs it, the store keeps the record.

Resume, progress, dry runs and Ctrl-C are handled here and nowhere else.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from longseq_bench.core.model import Environment, Record, Trial
from longseq_bench.launchers.base import Launcher
from longseq_bench.search.strategy import Schedule, Step


class RecordStore(Protocol):
    """An object that keeps records: a Store, or NoStore."""

    def find(self, trial: Trial, fingerprint: str) -> Record | None:
        """Return the record of this trial in this environment; None if there is none."""

    def append(self, record: Record) -> Record:
        """Keep a record and return it."""
        ...


class NoStore:
    """A store that keeps nothing."""

    def find(self, trial: Trial, fingerprint: str) -> Record | None:
        """Return None: there are no records."""
        return None

    def append(self, record: Record) -> Record:
        """Return the record."""
        return record


class Watcher:
    """An observer of a run that does nothing. Subclass it for progress."""

    def starts(self, step: Step) -> None:
        """Note that a trial starts."""

    def phase(self, phase: str, part: str) -> None:
        """Note that the running trial enters a phase."""

    def ends(self, step: Step, record: Record, found: bool) -> None:
        """Note that a record is on disk. found: it was there before this run."""


class Watchers(Watcher):
    """Several observers, called one after the other."""

    def __init__(self, *each: Watcher) -> None:
        self.each = each

    def starts(self, step: Step) -> None:
        """Pass on the start of a trial."""
        for watcher in self.each:
            watcher.starts(step)

    def phase(self, phase: str, part: str) -> None:
        """Pass on the phase of the running trial."""
        for watcher in self.each:
            watcher.phase(phase, part)

    def ends(self, step: Step, record: Record, found: bool) -> None:
        """Pass on the end of a trial."""
        for watcher in self.each:
            watcher.ends(step, record, found)


def run_schedule(
    schedule: Schedule,
    launcher: Launcher,
    store: RecordStore,
    environment: Callable[[], Environment],
    watcher: Watcher | None = None,
    command: str | None = None,
) -> list[Record]:
    """Run a schedule to its end and return its records.

    Every record is on disk before the schedule receives it. KeyboardInterrupt passes through: the
    launcher ends the running trial, which leaves no record.
    """
    watcher = watcher or Watcher()
    fingerprint = environment().fingerprint
    record: Record | None = None
    while True:
        try:
            step = next(schedule) if record is None else schedule.send(record)
        except StopIteration as done:
            records: list[Record] = done.value
            return records
        record = store.find(step.trial, fingerprint)
        if record is not None:
            watcher.ends(step, record, found=True)
            continue
        watcher.starts(step)
        machine, foreseen = environment(), step.predict()
        started, clock = datetime.now(UTC), time.perf_counter()
        launched = launcher.run(step.trial, watcher.phase)
        record = store.append(
            Record(
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
        )
        watcher.ends(step, record, found=False)
