"""The run loop: the schedule requests a trial, the launcher runs it, the store keeps the record.

This module alone resumes a run from stored records and calls the observers of progress.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self

from longseq_bench.core.model import Environment, Outcome, Record
from longseq_bench.launchers.base import Launcher, OnPhase
from longseq_bench.search.strategy import Schedule, Step
from longseq_bench.store import Store, find_impossible_sample


class Watcher:
    """An observer of a run that does nothing. Subclass it for progress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End what the watcher shows."""

    def starts(self, step: Step) -> None:
        """Note that a trial starts."""

    def phase(self, phase: str, part: str) -> None:
        """Note that the running trial enters a phase."""

    def skips_records(self, sentence: str) -> None:
        """Note, at most once in a run, that stored records of the same trials do not count."""

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Note that a record is on disk. from_store: an earlier run wrote it."""


def run_schedule(
    schedule: Schedule,
    launcher: Launcher,
    store: Store | None,
    environment: Callable[[], Environment],
    watcher: Watcher | None = None,
    command: str | None = None,
) -> list[Record]:
    """Run a schedule to its end and return its records.

    Every record is in the store, if there is one, before the schedule receives it.
    KeyboardInterrupt passes through: the launcher ends the running trial, which leaves no record.
    """
    watcher = watcher or Watcher()
    here, has_skipped = environment(), False
    record: Record | None = None
    while True:
        try:
            step = next(schedule) if record is None else schedule.send(record)
        except StopIteration as done:
            records: list[Record] = done.value
            return records
        record = store.find(step.trial, here.fingerprint) if store else None
        from_store = record is not None
        if record is None:
            if store and not has_skipped:
                sentence = store.describe_skipped_records(step.trial, here)
                if sentence:
                    watcher.skips_records(sentence)
                has_skipped = bool(sentence)
            watcher.starts(step)
            record = _run(step, launcher, environment(), watcher.phase, command)
            if store:
                store.append(record)
        watcher.ends(step, record, from_store)


def _run(
    step: Step, launcher: Launcher, environment: Environment, on_phase: OnPhase, command: str | None
) -> Record:
    prediction = step.predict()
    started_at, start_s = datetime.now(UTC), time.perf_counter()
    launched = launcher.run(step.trial, on_phase)
    outcome = launched.outcome
    if reason := find_impossible_sample(outcome):  # its line could not be read again
        reason = f"a meter is broken: {reason}"
        outcome = Outcome(status="error", reason=reason, facts=outcome.facts)
    return Record(
        trial=step.trial,
        outcome=outcome,
        environment=environment,
        started_at=started_at.isoformat(timespec="seconds"),
        wall_s=time.perf_counter() - start_s,
        processes=launched.processes,
        purpose=step.purpose,
        predicted_tokens=step.predicted_tokens,
        foreseen=prediction,
        command=command,
    )
