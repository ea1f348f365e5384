"""The run loop: the schedule requests a trial, the launcher runs it, the store keeps the record.

This module alone resumes a run from stored records and calls the observers of progress.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from longseq_bench.core.model import Environment, Outcome, Record
from longseq_bench.core.record_line import find_impossible_sample
from longseq_bench.launchers.base import Launcher, OnPhase
from longseq_bench.search.strategy import Schedule, Step
from longseq_bench.store import Store


class Watcher:
    """An observer of a run that does nothing. Subclass it for progress."""

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
    watchers: Sequence[Watcher] = (),
    command: str | None = None,
) -> list[Record]:
    """Run a schedule to its end and return its records.

    Every record is in the store, if there is one, before the schedule receives it.
    KeyboardInterrupt passes through: the launcher ends the running trial, which leaves no record.
    """

    def on_phase(phase: str, part: str) -> None:
        for watcher in watchers:
            watcher.phase(phase, part)

    here = environment()
    has_skipped = False
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
                has_skipped = _note_skipped_records(store, step, here, watchers)
            for watcher in watchers:
                watcher.starts(step)
            record = _run(step, launcher, environment(), on_phase, command)
            if store:
                store.append(record)
        for watcher in watchers:
            watcher.ends(step, record, from_store)


def _note_skipped_records(
    store: Store, step: Step, here: Environment, watchers: Sequence[Watcher]
) -> bool:
    """Tell the watchers if the trial of a step was measured elsewhere; return True if it was."""
    sentence = store.describe_skipped_records(step.trial, here)
    if sentence:
        for watcher in watchers:
            watcher.skips_records(sentence)
    return bool(sentence)


def _run(
    step: Step, launcher: Launcher, environment: Environment, on_phase: OnPhase, command: str | None
) -> Record:
    prediction = step.predict()
    started_at, start_s = datetime.now(UTC), time.perf_counter()
    launched = launcher.run(step.trial, on_phase)
    return Record(
        trial=step.trial,
        outcome=_without_impossible(launched.outcome),
        environment=environment,
        started_at=started_at.isoformat(timespec="seconds"),
        wall_s=time.perf_counter() - start_s,
        processes=launched.processes,
        purpose=step.purpose,
        predicted_tokens=step.predicted_tokens,
        foreseen=prediction,
        command=command,
    )


def _without_impossible(outcome: Outcome) -> Outcome:
    """Return an `error` without measurements if a meter returned what can't be measured.

    Such a record would be a broken line when it is read again.
    """
    reason = find_impossible_sample(outcome)
    if reason is None:
        return outcome
    return Outcome(status="error", reason=f"a meter is broken: {reason}", facts=outcome.facts)
