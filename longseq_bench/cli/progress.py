"""Progress on stderr: the running trial, finished trials, remaining trials and time."""

import time
from collections.abc import Hashable, Iterable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from longseq_bench.analysis.searches import density_key
from longseq_bench.api.progress import RunWatcher
from longseq_bench.api.trial_text import Labels, describe_outcome
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import Record, Trial
from longseq_bench.core.plain_text import one_line
from longseq_bench.core.units import format_seconds
from longseq_bench.reports.render.terminal_text import plain
from longseq_bench.search.strategy import Step

START_FLOPS = 1e10  # weight of a process start in the estimate of the remaining time, in FLOPs
_COLOURS = {"ok": "default", "oom": "yellow", "timeout": "yellow", "unsupported": "dim"}


class ProgressLines(RunWatcher):
    """Prints a line per finished trial and, on a terminal, a live line for the running one.

    heading: a first line, printed when the run starts.  total: number of trials, if it is known.
    """

    def __init__(
        self, console: Console, trials: Iterable[Trial], heading: str = "", total: int | None = None
    ) -> None:
        self.console, self._heading = console, heading
        self._labels = Labels(trials)
        self._total, self._finished = total, 0
        self._live = Progress(
            SpinnerColumn(),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("starting", total=None, left="")
        self._running = ""

    def __enter__(self) -> Self:
        if self._heading:
            self.console.print(self._heading, markup=False)
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def starts(self, step: Step) -> None:
        """Show the trial on the live line."""
        self._running = one_line(self._labels.label(step.trial))
        self._live.update(self._task, description=self._running)

    def phase(self, phase: str, part: str) -> None:
        """Show the phase of the running trial on the live line."""
        doing = f"{phase} ({part})" if part else phase
        self._live.update(self._task, description=f"{self._running} · {one_line(doing)}")

    def skips_records(self, sentence: str) -> None:
        """Print the sentence."""
        self.console.print(plain(sentence, "yellow"))

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Print the line of a finished trial."""
        self._finished += 1
        count = f"{self._finished}/{self._total}" if self._total else str(self._finished)
        line = Text(f"[{count}] {one_line(self._labels.label(step.trial))}  ")
        colour = _COLOURS.get(record.outcome.status, "red")
        line.append(one_line(describe_outcome(record)), style=colour)
        if from_store:
            line.append("  (from an earlier run)", style="dim")
        self.console.print(line)


class SweepProgress(ProgressLines):
    """Adds the progress and the remaining time, weighted by the FLOPs of each trial."""

    def __init__(
        self, console: Console, trials: Iterable[Trial], rounds: int, heading: str = ""
    ) -> None:
        trials = list(trials)
        super().__init__(console, trials, heading, len(trials) * rounds)
        self._weights = {(_any_round(t), r): _weight(t) for t in trials for r in range(rounds)}
        self._left = sum(self._weights.values())
        self._spent = self._done = 0.0
        self._walls: dict[Hashable, float] = {}
        self._total_wall_s = self._wall_weight = 0.0
        self._start_s = time.monotonic()
        self.summary = f"0 of {self._total} done"
        self._live.update(self._task, total=self._left)

    def expected(self, step: Step) -> float:
        """Return the expected time of a trial (s); 0 if nothing is known.

        From an earlier round of the trial, else from its FLOPs and the rate of the other trials.
        """
        first = _any_round(step.trial)
        if first in self._walls:
            return self._walls[first]
        per_weight = self._total_wall_s / self._wall_weight if self._wall_weight else 0.0
        return _weight(step.trial) * per_weight

    def starts(self, step: Step) -> None:
        """Start the clock of a trial."""
        self._start_s = time.monotonic()
        super().starts(step)

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Update the remaining time. A trial that failed has no further rounds."""
        trial = step.trial
        first = _any_round(trial)
        finished = [(first, trial.round)]
        if record.outcome.status != "ok":
            finished = [key for key in self._weights if key[0] == first]
            self._finished += len(finished) - 1
        weight = sum(self._weights.pop(key, 0.0) for key in finished)
        self._walls[first] = record.wall_s
        self._total_wall_s += record.wall_s
        self._wall_weight += _weight(trial)
        self._left -= weight
        if not from_store:
            self._spent += time.monotonic() - self._start_s
            self._done += _weight(trial)
        remaining_s = self._left * self._spent / self._done if self._done else 0.0
        assert self._total is not None
        done = self._total - len(self._weights)
        self.summary = f"{done} of {self._total} done, about {format_seconds(remaining_s)} to go"
        self._live.update(self._task, advance=weight, left=self.summary)
        super().ends(step, record, from_store)


class SearchProgress(ProgressLines):
    """Adds the current bracket of each search, or the number of timed trials."""

    def __init__(self, console: Console, trials: Iterable[Trial], heading: str = "") -> None:
        super().__init__(console, trials, heading)
        self._passed: dict[Hashable, int] = {}
        self._failed: dict[Hashable, int] = {}
        self._sparsities: dict[Hashable, tuple[float, float]] = {}
        self._timed = 0

    def starts(self, step: Step) -> None:
        """Show the number of timed trials instead of a bracket once the search is over."""
        super().starts(step)
        if step.purpose == "measure":
            self._live.update(self._task, left=f"timing, {self._timed} done")

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Show the current bracket of the edge after a run."""
        super().ends(step, record, from_store)
        if step.purpose == "measure":
            self._timed += 1
            left = f"timing, {self._timed} done"
        elif step.purpose == "density":
            left = self._narrow_sparsity(step, record)
        else:
            left = self._narrow_length(step, record)
        self._live.update(self._task, left=left)

    def _narrow_sparsity(self, step: Step, record: Record) -> str:
        """Return the bracket of sparsities: the highest that failed, the lowest that passed."""
        search = density_key(step.trial)
        low, high = self._sparsities.get(search, (0.0, 1.0))
        at = float(str(step.trial.options["sparsity"]))
        low, high = (low, min(high, at)) if record.outcome.fits else (max(low, at), high)
        self._sparsities[search] = low, high
        return f"[sparsity {low:.5f} failed … {high:.5f} passed]"

    def _narrow_length(self, step: Step, record: Record) -> str:
        """Return the bracket of lengths, its width, and the predicted edge."""
        search = step.trial.key_without("seq_len", "round", "repeats")
        tokens = step.trial.workload.seq_len
        if record.outcome.fits:
            self._passed[search] = max(tokens, self._passed.get(search, 0))
        elif tokens > self._passed.get(search, 0):
            self._failed[search] = min(tokens, self._failed.get(search, tokens))
        low, high = self._passed.get(search, 0), self._failed.get(search)
        words = f"[{low:,} passed … {f'{high:,} failed' if high else '?'}]"
        if low and high:
            words += f" {(high - low) / low:.1%} apart"
        return words + (f", predicted {step.predicted_tokens:,}" if step.predicted_tokens else "")


def _any_round(trial: Trial) -> Hashable:
    """Return a key of all rounds of a trial; models of one shape have one each."""
    return trial.key_without("round")


def _weight(trial: Trial) -> float:
    return START_FLOPS + attention_flops(trial.workload)
