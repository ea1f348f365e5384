"""Progress of a run on stderr: notes, the device, finished trials, remaining trials and time.

A Reporter says nothing. ConsoleReporter prints lines, and draws the running trial on a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from longseq_bench.api.trial_text import Labels, describe_outcome
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import Record, Trial
from longseq_bench.core.plain_text import one_line
from longseq_bench.core.units import format_seconds
from longseq_bench.reports.render.terminal import plain
from longseq_bench.runner import Watcher
from longseq_bench.search.strategy import Step

START_FLOPS = 1e10
"""Weight of a process start in the estimate of the remaining time (FLOPs)."""
_COLOURS = {"ok": "default", "oom": "yellow", "timeout": "yellow", "unsupported": "dim"}


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

    def watch_sweep(self, trials: Sequence[Trial], rounds: int, heading: str) -> RunWatcher:
        """Return the watcher of a sweep. heading: a sentence on devices."""
        return RunWatcher()

    def watch_search(self, trials: Sequence[Trial], heading: str) -> RunWatcher:
        """Return the watcher of a search."""
        return RunWatcher()


def make_reporter(progress: bool | Reporter) -> Reporter:
    """Return the reporter of an argument `progress`: True prints lines, False prints nothing."""
    if isinstance(progress, Reporter):
        return progress
    return ConsoleReporter(is_drawn=False) if progress else Reporter()


class ConsoleReporter(Reporter):
    """A reporter that prints on stderr. is_drawn: on a terminal, draw the running trial."""

    def __init__(self, command: str | None = None, is_drawn: bool = True) -> None:
        self.command, self._is_drawn = command, is_drawn

    @property
    def console(self) -> Console:
        """A console on the stderr of now: a notebook and pytest replace it."""
        is_terminal = None if self._is_drawn else False
        return Console(
            stderr=True,
            highlight=False,
            soft_wrap=True,
            force_terminal=is_terminal,
            force_jupyter=False,
        )

    def say(self, lines: Iterable[str], style: str = "") -> None:
        """Print lines; markup in them is printed as it is."""
        screen = self.console
        for line in lines:
            screen.print(plain(line, style))

    def note(self, lines: Iterable[str]) -> None:
        """Print lines in yellow."""
        self.say(lines, "yellow")

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show what the run waits for, on a terminal."""
        return self.console.status(text) if self._is_drawn else nullcontext()

    def watch_sweep(self, trials: Sequence[Trial], rounds: int, heading: str) -> RunWatcher:
        """Return a watcher that knows the number of trials, and so the remaining time."""
        return RunProgress(self.console, trials, heading, rounds)

    def watch_search(self, trials: Sequence[Trial], heading: str) -> RunWatcher:
        """Return a watcher that shows the current bracket."""
        return RunProgress(self.console, trials, heading)


class RunProgress(RunWatcher):
    """Prints a line per finished trial and, on a terminal, a live line for the running one.

    heading: printed when the run starts.  rounds: those of a sweep, of which every trial is known;
    0: a search. The live line has the remaining time of a sweep, by the FLOPs of its trials, or the
    bracket of a search.
    """

    def __init__(
        self, console: Console, trials: Sequence[Trial], heading: str, rounds: int = 0
    ) -> None:
        self.console, self._heading = console, heading
        self._labels, self._total, self._finished = Labels(trials), len(trials) * rounds, 0
        self._left = {(_any_round(t), r): _weight(t) for t in trials for r in range(rounds)}
        self._spent_s = self._done = 0.0
        self._brackets: dict[Hashable, tuple[int, int | None]] = {}
        self._started_s, self._running = time.monotonic(), ""
        width = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=width),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        total = sum(self._left.values()) or None
        self._task = self.live.add_task("starting", total=total, left="")

    def __enter__(self) -> Self:
        self.console.print(plain(self._heading))
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the live line."""
        self.live.stop()

    def starts(self, step: Step) -> None:
        """Show the trial on the live line."""
        self._started_s = time.monotonic()
        self._running = one_line(self._labels.label(step.trial))
        self.live.update(self._task, description=self._running)
        if step.purpose == "measure" and not self._total:
            self.live.update(self._task, left="timing")

    def phase(self, phase: str, part: str) -> None:
        """Show the phase of the running trial on the live line."""
        doing = f"{phase} ({part})" if part else phase
        self.live.update(self._task, description=f"{self._running} · {one_line(doing)}")

    def skips_records(self, sentence: str) -> None:
        """Print the sentence."""
        self.console.print(plain(sentence, "yellow"))

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Print the line of a finished trial, and update the live one."""
        self._finished += 1
        if self._total:
            self._end_of_sweep(step.trial, record, from_store)
        elif step.purpose not in ("measure", "density"):
            self.live.update(self._task, left=self._narrow(step, record))
        count = f"{self._finished}/{self._total}" if self._total else str(self._finished)
        line = Text(f"[{count}] {one_line(self._labels.label(step.trial))}  ")
        colour = _COLOURS.get(record.outcome.status, "red")
        line.append(one_line(describe_outcome(record)), style=colour)
        if from_store:
            line.append("  (from an earlier run)", style="dim")
        self.console.print(line)

    def _end_of_sweep(self, trial: Trial, record: Record, from_store: bool) -> None:
        """Update the remaining time. A trial that failed has no further rounds."""
        first = _any_round(trial)
        ended = [(first, trial.round)]
        if record.outcome.status != "ok":
            ended = [key for key in self._left if key[0] == first]
            self._finished += len(ended) - 1
        weight = sum(self._left.pop(key, 0.0) for key in ended)
        if not from_store:
            self._spent_s += time.monotonic() - self._started_s
            self._done += _weight(trial)
        left_s = sum(self._left.values()) * self._spent_s / self._done if self._done else 0.0
        words = f"{self._finished} of {self._total} done, about {format_seconds(left_s)} to go"
        self.live.update(self._task, advance=weight, left=words)

    def _narrow(self, step: Step, record: Record) -> str:
        """Return the bracket of lengths, its width, and the predicted edge."""
        search, tokens = (
            step.trial.key_without("seq_len", "round", "repeats"),
            step.trial.workload.seq_len,
        )
        low, high = self._brackets.get(search, (0, None))
        if record.outcome.fits:
            low = max(low, tokens)
        elif tokens > low:
            high = min(tokens, high or tokens)
        self._brackets[search] = low, high
        words = f"[{low:,} passed … {f'{high:,} failed' if high else '?'}]"
        if low and high:
            words += f" {(high - low) / low:.1%} apart"
        return words + (f", predicted {step.predicted_tokens:,}" if step.predicted_tokens else "")


def _any_round(trial: Trial) -> Hashable:
    """Return a key of all rounds of a trial; models of one shape have one each."""
    return trial.key_without("round")


def _weight(trial: Trial) -> float:
    return START_FLOPS + attention_flops(trial.workload)
