"""Messages of a run: notes, the device, and a line for each finished trial.

A Reporter says nothing. PlainReporter prints lines without control characters, for scripts and
notebooks; the command line has one that draws on a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from longseq_bench.core.model import Record, Trial
from longseq_bench.runner import Watcher
from longseq_bench.search.strategy import Step


class RunWatcher(Watcher):
    """A watcher that is entered when a run starts and left when it ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End what the watcher shows."""


class Reporter:
    """A reporter that says nothing. Subclass it to show a run.

    command: the command line that is recorded with every trial; None: Python code.
    """

    command: str | None = None

    def say(self, lines: Iterable[str]) -> None:
        """Say what was understood or written."""

    def note(self, lines: Iterable[str]) -> None:
        """Say what could not be read."""

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Say what the run waits for, within the block."""
        return nullcontext()

    def watch_sweep(
        self, trials: Sequence[Trial], rounds: int, heading: str, baseline: str | None
    ) -> RunWatcher:
        """Return the watcher of a sweep. heading: a sentence on devices."""
        return RunWatcher()

    def watch_search(self, trials: Sequence[Trial], heading: str) -> RunWatcher:
        """Return the watcher of a search."""
        return RunWatcher()


class PlainReporter(Reporter):
    """A reporter that prints plain lines on stderr."""

    def say(self, lines: Iterable[str]) -> None:
        """Print lines."""
        for line in lines:
            _print(line)

    def note(self, lines: Iterable[str]) -> None:
        """Print lines."""
        self.say(lines)

    def watch_sweep(
        self, trials: Sequence[Trial], rounds: int, heading: str, baseline: str | None
    ) -> RunWatcher:
        """Return a watcher that prints a line per trial, with the number of all trials."""
        return _Lines(trials, heading, len(trials) * rounds)

    def watch_search(self, trials: Sequence[Trial], heading: str) -> RunWatcher:
        """Return a watcher that prints a line per trial."""
        return _Lines(trials, heading, None)


def make_reporter(progress: bool | Reporter) -> Reporter:
    """Return the reporter of an argument `progress`: True prints lines, False prints nothing."""
    if isinstance(progress, Reporter):
        return progress
    return PlainReporter() if progress else Reporter()


class _Lines(RunWatcher):
    """Prints the heading, then a line per finished trial."""

    def __init__(self, trials: Sequence[Trial], heading: str, total: int | None) -> None:
        from longseq_bench.api.trial_text import Labels

        self._labels, self._heading = Labels(trials), heading
        self._total, self._finished = total, 0

    def __enter__(self) -> Self:
        _print(self._heading)
        return self

    def skips_records(self, sentence: str) -> None:
        """Print the sentence."""
        _print(sentence)

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Print the line of a finished trial."""
        from longseq_bench.api.trial_text import describe_outcome

        self._finished += 1
        count = f"{self._finished}/{self._total}" if self._total else str(self._finished)
        line = f"[{count}] {self._labels.label(step.trial)}  {describe_outcome(record)}"
        _print(line + ("  (from an earlier run)" if from_store else ""))


def _print(line: str) -> None:
    from longseq_bench.core.plain_text import one_line

    # the stream of now: a notebook and pytest replace it
    if sys.stderr is not None:
        print(one_line(line), file=sys.stderr, flush=True)
