"""The run loop: the schedule requests a trial, the launcher runs it, the store keeps the record.

This module alone resumes a run from stored records and calls the observers of progress. A schedule
runs its trials one after the other; several schedules may run side by side, each on a worker.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from longseq_bench.core.model import Environment, Outcome, Record
from longseq_bench.launchers.base import Launcher, OnPhase
from longseq_bench.search.strategy import Schedule, Step
from longseq_bench.store import Store, find_impossible_sample

if TYPE_CHECKING:
    from longseq_bench.launchers.workers import Workers

_ALONE: AbstractContextManager[Any] = nullcontext()


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

    def of_worker(self, number: int) -> "Watcher":
        """Return the observer of a worker, numbered from 1."""
        return self


def run_schedule(
    schedule: Schedule,
    launcher: Launcher,
    store: Store | None,
    environment: Callable[[], Environment],
    watcher: Watcher | None = None,
    command: str | None = None,
    part: int | None = None,
    turn: AbstractContextManager[Any] = _ALONE,
) -> list[Record]:
    """Run a schedule to its end and return its records.

    Every record is in the store, if there is one, before the schedule receives it.
    KeyboardInterrupt passes through: the launcher ends the running trial, which leaves no record.
    part, turn: of several schedules. part: position of this one.  turn: held to use the store.
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
                with turn:
                    sentence = store.describe_skipped_records(step.trial, here)
                if sentence:
                    watcher.skips_records(sentence)
                has_skipped = bool(sentence)
            watcher.starts(step)
            record = _run(step, launcher, environment(), watcher.phase, command, part)
            if store:
                with turn:
                    store.append(record)
        with turn:
            watcher.ends(step, record, from_store)


def run_side_by_side(
    schedules: Sequence[Callable[[Launcher], Schedule]],
    order: Sequence[int],
    workers: "Workers",
    store: Store | None,
    environment: Callable[[], Environment],
    watcher: Watcher,
    command: str | None = None,
) -> list[Record]:
    """Run schedules on workers, and return their records as if they ran one after the other.

    order: positions of the schedules in the order in which they start; a worker that is free takes
    the next one.  If one raises an error, or at Ctrl-C, all workers end.
    """
    turn = Lock()

    def run(part: int) -> list[Record]:
        with workers.use_one() as worker:
            return run_schedule(
                schedules[part](worker), worker, store, environment,
                watcher.of_worker(worker.number), command, part, turn,
            )  # fmt: skip

    with ThreadPoolExecutor(len(workers)) as pool:
        futures = {part: pool.submit(run, part) for part in order}
        try:
            for one in as_completed(futures.values()):
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            workers.close()
            raise
    return [record for part in range(len(schedules)) for record in futures[part].result()]


def _run(
    step: Step, launcher: Launcher, environment: Environment, on_phase: OnPhase,
    command: str | None, part: int | None,
) -> Record:  # fmt: skip
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
        part=part,
        place=launched.place,
        purpose=step.purpose,
        predicted_tokens=step.predicted_tokens,
        foreseen=prediction,
        command=command,
    )
