"""Progress of a run on stderr: notes, the device, finished and remaining trials in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from textwrap import shorten
from threading import Event, Thread
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from longseq_bench.analysis.labels import (
    index_short_labels,
    mask_words,
    mode_words,
    option_text,
    settings_key,
)
from longseq_bench.analysis.runs import per_iteration
from longseq_bench.core.errors import one_line
from longseq_bench.core.model import OptionValue, Record, Trial
from longseq_bench.core.stats import median_interval
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports import groups
from longseq_bench.reports.document import Spread, format_cell
from longseq_bench.reports.render.terminal import plain
from longseq_bench.runner import Watcher
from longseq_bench.search.strategy import Step

MAX_REASON = 100  # characters of a failure's reason that are shown; the record has all of it
_TIMED_PHASES = ("forward", "backward", "communication", "time")


def _settings(trial: Trial) -> tuple[str, ...]:
    w, ranks = trial.workload, f"{trial.world_size} rank{'s' * (trial.world_size > 1)}"
    heads = f"heads {w.heads}/{w.kv_heads} of {w.head_dim}/{w.v_head_dim}"
    shape = " ".join(filter(None, (w.model, f"batch {w.batch}", heads, "sinks" * w.sink)))
    mode, mask = mode_words(w.mode, w.new_tokens, w.kv_dtype), mask_words(w.visibility.text)
    return ranks, w.dtype, mode, mask, trial.device, shape


class TrialLabels:
    """Short labels of trials: only what differs between them."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._short = index_short_labels(trials)
        self._differs = [len(set(words)) > 1 for words in zip(*map(_settings, trials), strict=True)]

    def label(self, trial: Trial) -> str:
        """Return the implementation, its length and the other settings that differ.

        trial: one of them, also of another length.
        """
        name, _, settings = self._short[settings_key(trial)].partition(" ")
        name = f"{name} {format_tokens(trial.workload.seq_len)} {settings}".rstrip()
        return " ".join([name, *compress(_settings(trial), self._differs)])


def format_option(value: OptionValue) -> str:
    """Return an option's value as it is written after -o NAME=."""
    return "none" if value is None else option_text(value)


def describe_record(record: Record) -> str:
    """Return the time of a trial with its spread, or its failure, in a few words."""
    outcome, trial = record.outcome, record.trial
    if outcome.status == "timeout" and trial.time_budget and outcome.phase in _TIMED_PHASES:
        return f"over the time limit of {format_seconds(trial.time_budget)}"
    if outcome.status != "ok":  # without the allocator's text
        reason = outcome.reason or ""
        if outcome.status != "oom":
            reason = shorten(reason, MAX_REASON, placeholder=" …")
        return groups.describe_outcome(outcome.status, outcome.phase, reason)
    words = []
    if times := per_iteration(record, "time"):
        low, middle, high = median_interval(times)
        spread = format_cell(Spread(middle, low, high), "seconds")
        # one sample has no spread; that is not a spread of 0
        words.append(spread if len(times) > 1 else f"{format_seconds(middle)} (once)")
    elif passed := outcome.largest("pass_time"):
        words.append(f"one pass {format_seconds(passed)}")
    peak, bound = outcome.largest("peak"), outcome.largest("peak_bound")
    if record.purpose != "measure" and (peak or bound):
        per_rank = " per rank" if trial.world_size > 1 else ""
        size = format_bytes(peak or bound or 0)
        words.append(f"peak {'' if peak else 'at most '}{size}{per_rank}")
    return ", ".join(words)


SPEED_S = 3600.0
"""The time to go comes from the trials of this long: short and long ones take turns."""

ALIVE_S = 30.0
"""Seconds without a line after which a log, which has no live line, gets one."""

_COLOURS = {"ok": "default", "oom": "yellow", "timeout": "yellow", "unsupported": "dim"}


class Reporter:
    """Prints the progress of a run on stderr.

    command: the command line that is recorded with every trial; None: Python code.
    is_drawn: on a terminal, draw the running trial.  is_quiet: print nothing.
    """

    def __init__(
        self, command: str | None = None, is_drawn: bool = True, is_quiet: bool = False
    ) -> None:
        self.command, self._is_drawn, self._is_quiet = command, is_drawn, is_quiet

    @property
    def console(self) -> Console:
        """A console on the stderr of now: a notebook and pytest replace it."""
        return Console(
            stderr=True,
            highlight=False,
            soft_wrap=True,
            quiet=self._is_quiet,
            force_terminal=None if self._is_drawn else False,
            force_jupyter=False,
        )

    def say(self, lines: Iterable[str], style: str = "") -> None:
        """Print lines; markup in them is printed as it is."""
        screen = self.console
        for line in lines:
            screen.print(plain(line, style))

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show what the run waits for, on a terminal."""
        return nullcontext() if self._is_quiet or not self._is_drawn else self.console.status(text)


def make_reporter(progress: bool | Reporter) -> Reporter:
    """Return the reporter of an argument `progress`: True prints lines, False prints nothing."""
    if isinstance(progress, Reporter):
        return progress
    return Reporter(is_drawn=False, is_quiet=not progress)


class RunProgress(Watcher):
    """Prints a line per finished trial and, on a terminal, a live line for the running one.

    A log, without a terminal, gets a line on the running one after each ALIVE_S seconds of silence.
    heading: printed when the run starts.  rounds: those of a sweep, of which every trial is known;
    0: a search.
    """

    def __init__(
        self, console: Console, trials: Sequence[Trial], heading: str, rounds: int = 0
    ) -> None:
        self.console, self._heading, self._rounds = console, heading, rounds
        self._labels, self._total = TrialLabels(trials), len(trials) * rounds
        self._finished, self._running, self._doing = 0, "", "starting"
        self._workers = dict[int, Watcher]()
        self._spoke, self._ended = Event(), False
        to_go = [TextColumn("{task.fields[left]}"), TimeRemainingColumn()] if self._total else []
        width = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=width),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            *to_go,
            speed_estimate_period=SPEED_S,
            console=console,
            expand=True,
            transient=True,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self.live.add_task("starting", total=self._total or None, left="to go")

    def __enter__(self) -> Self:
        self.console.print(plain(self._heading))
        self.live.start()
        if not (self.console.quiet or self.console.is_terminal):
            Thread(target=self._stay_alive, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the live line."""
        self.live.stop()
        self._ended = True
        self._spoke.set()

    def _stay_alive(self) -> None:
        while not self._ended:
            if self._spoke.wait(ALIVE_S):
                self._spoke.clear()
            else:
                self.console.print(plain(f"still running: {self._doing}", "dim"))

    def starts(self, step: Step) -> None:
        """Show the trial on the live line."""
        self._running = self.show(self._task, step)

    def phase(self, phase: str, part: str) -> None:
        """Show the phase of the running trial on the live line."""
        self.show_phase(self._task, self._running, phase, part)

    def show(self, line: TaskID, step: Step) -> str:
        """Show a trial on a live line, and return what stands there."""
        self._doing = one_line(self._labels.label(step.trial))
        self.live.update(line, description=self._doing)
        return self._doing

    def show_phase(self, line: TaskID, running: str, phase: str, part: str) -> None:
        """Show the phase of a trial on its live line."""
        doing = f"{phase} ({part})" if part else phase
        self._doing = f"{running} · {one_line(doing)}"
        self.live.update(line, description=self._doing)

    def of_worker(self, number: int) -> Watcher:
        """Return the observer of a worker, which has a live line of its own."""
        if number not in self._workers:
            self.live.update(self._task, description="all workers")
            self._workers[number] = _WorkerLine(self, number)
        return self._workers[number]

    def skips_records(self, sentence: str) -> None:
        """Print the sentence."""
        self.console.print(plain(sentence, "yellow"))

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Print the line of a finished trial."""
        self._spoke.set()
        self._finished += 1
        if self._total and record.outcome.status != "ok":  # a failed trial has no further rounds
            self._finished += self._rounds - 1 - step.trial.round
        self.live.update(self._task, completed=self._finished)
        count = f"{self._finished}/{self._total}" if self._total else str(self._finished)
        line = Text(f"[{count}] {one_line(self._labels.label(step.trial))}  ")
        colour = _COLOURS.get(record.outcome.status, "red")
        line.append(one_line(describe_record(record)), style=colour)
        if from_store:
            line.append("  (from an earlier run)", style="dim")
        self.console.print(line)


class _WorkerLine(Watcher):
    """The live line of one of several workers of a run."""

    def __init__(self, run: RunProgress, number: int) -> None:
        self._run, self._running = run, ""
        self._task = run.live.add_task(f"worker {number}", total=None, left="")

    def starts(self, step: Step) -> None:
        """Show the trial on the live line."""
        self._running = self._run.show(self._task, step)

    def phase(self, phase: str, part: str) -> None:
        """Show the phase of the running trial on the live line."""
        self._run.show_phase(self._task, self._running, phase, part)

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Print the line of a finished trial."""
        self._run.ends(step, record, from_store)
