"""Progress for people, on stderr: what runs now, what is done, what is left, time to go."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.analysis.searches import density_key
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import OptionValue, Record, Trial
from longseq_bench.core.stats import median_interval
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.runner import Watcher
from longseq_bench.search.strategy import Step

_MARKS = {"ok": ("✓", "green"), "oom": ("○", "yellow"), "timeout": ("○", "yellow"),
          "unsupported": ("–", "dim")}  # fmt: skip
_FLOPS_LIKE_A_START = 1e10
"""What a process start weighs beside computing, when guessing the time to go."""


class Progressing(Watcher):
    """A line a finished trial, and, on a terminal, a live line for what runs now."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Progress(
            SpinnerColumn(),
            TextColumn(
                "{task.description}",
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
        self._now = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def starts(self, step: Step) -> None:
        self._now = trial_words(step.trial)
        self._live.update(self._task, description=self._now)

    def phase(self, phase: str, part: str) -> None:
        doing = f"{phase} ({part})" if part else phase
        self._live.update(self._task, description=f"{self._now} · {doing}")

    def ends(self, step: Step, record: Record, found: bool) -> None:
        mark, colour = _MARKS.get(record.outcome.status, ("✗", "red"))
        line = Text(f"{mark} ", style=colour)
        line.append(f"{trial_words(step.trial)}  {outcome_words(record)}", style="default")
        if found:
            line.append("  (already there)", style="dim")
        self.console.print(line)


class SweepProgress(Progressing):
    """With the share done and the time to go, weighed by what each trial has to compute."""

    def __init__(self, console: Console, trials: Iterable[Trial], rounds: int) -> None:
        super().__init__(console)
        self._weights = {(t.key, r): _weight(t) for t in trials for r in range(rounds)}
        self._left = sum(self._weights.values())
        self._total = len(self._weights)
        self._spent = self._done = 0.0
        self._walls: dict[str, float] = {}
        self._walls_s = self._walls_weight = 0.0
        self._began = time.monotonic()
        self.said = f"0 of {self._total} done"
        self._live.update(self._task, total=self._left)

    def expected(self, step: Step) -> float:
        """About how long a trial will take (s): as long as in another round, else by what it has to
        compute beside what the others had; 0 where nothing is known."""
        if step.trial.but(round=0).key in self._walls:
            return self._walls[step.trial.but(round=0).key]
        pace = self._walls_s / self._walls_weight if self._walls_weight else 0.0
        return _weight(step.trial) * pace

    def starts(self, step: Step) -> None:
        self._began = time.monotonic()
        super().starts(step)

    def ends(self, step: Step, record: Record, found: bool) -> None:
        trial = step.trial
        first = trial.but(round=0).key
        skipped = record.outcome.status != "ok"
        gone = [(first, trial.round)]
        if skipped:
            gone = [k for k in self._weights if k[0] == first]
        weight = sum(self._weights.pop(k, 0.0) for k in gone)
        self._walls[first] = record.wall_s
        self._walls_s += record.wall_s
        self._walls_weight += _weight(trial)
        self._left -= weight
        if not found:
            self._spent += time.monotonic() - self._began
            self._done += _weight(trial)
        to_go = self._left * self._spent / self._done if self._done else 0.0
        done = self._total - len(self._weights)
        self.said = f"{done} of {self._total} done, about {format_seconds(to_go)} to go"
        self._live.update(self._task, advance=weight, left=self.said)
        super().ends(step, record, found)


class SearchProgress(Progressing):
    """With the bracket of each search as it closes."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._passed: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._sparsities: dict[Hashable, tuple[float, float]] = {}

    def ends(self, step: Step, record: Record, found: bool) -> None:
        if step.purpose == "density":
            self._narrow(step, record)
            super().ends(step, record, found)
            return
        search = step.trial.at(1).but(round=0, repeats=0).key
        tokens = step.trial.workload.seq_len
        if record.outcome.fits:
            self._passed[search] = max(tokens, self._passed.get(search, 0))
        elif tokens > self._passed.get(search, 0):
            self._failed[search] = min(tokens, self._failed.get(search, tokens))
        super().ends(step, record, found)
        self._live.update(self._task, left=self._bracket(search, step.predicted_tokens))

    def _narrow(self, step: Step, record: Record) -> None:
        """Of a search for the least sparsity: the least that passed, the largest that failed."""
        search = density_key(step.trial)
        low, high = self._sparsities.get(search, (0.0, 1.0))
        at = float(str(step.trial.options["sparsity"]))
        low, high = (low, min(high, at)) if record.outcome.fits else (max(low, at), high)
        self._sparsities[search] = low, high
        words = f"[sparsity {low:.5f} failed … {high:.5f} passed]"
        self._live.update(self._task, left=words)

    def _bracket(self, search: str, predicted: int | None) -> str:
        low, high = self._passed.get(search, 0), self._failed.get(search)
        words = f"[{low:,} passed … {f'{high:,} failed' if high else '?'}]"
        if low and high:
            words += f" {(high - low) / low:.1%} apart"
        return words + (f", predicted {predicted:,}" if predicted else "")


def trial_words(trial: Trial) -> str:
    """A trial in a few words: what differs most between trials first."""
    w = trial.workload
    words = [trial.implementation, format_tokens(w.seq_len), w.dtype]
    words += [option_words(trial)] if trial.options else []
    words += [f"on {trial.world_size} ranks"] if trial.world_size > 1 else []
    words += [w.mode] if w.train else []
    words += ["causal"] if w.causal else []
    words += [trial.device] if trial.device != "cpu" else []
    return " ".join(words)


def option_words(trial: Trial) -> str:
    """Options as they are written after -o."""
    return " ".join(f"{k}={option_value(v)}" for k, v in trial.options.items() if v is not None)


def option_value(value: OptionValue) -> str:
    """A value as it is written after -o NAME=."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def outcome_words(record: Record) -> str:
    """What came of it, in a few words."""
    outcome = record.outcome
    if outcome.status != "ok":
        where = f" in {outcome.phase}" if outcome.phase else ""
        return f"{outcome.status}{where}: {outcome.reason}"
    words = []
    a_rank = " a rank" if record.trial.world_size > 1 else ""
    if times := per_iteration(record, "time"):
        low, middle, high = median_interval(times)
        spread = max(high - middle, middle - low) / middle if middle else 0.0
        # one sample has no spread, which is not a spread of nothing
        off = f" ±{spread:.0%}" if len(times) > 1 else " (once)"
        words.append(format_seconds(middle) + off)
    elif passed := outcome.largest("pass_time"):
        words.append(f"one pass {format_seconds(passed)}")
    peak, bound = outcome.largest("peak"), outcome.largest("peak_bound")
    if peak is not None:
        words.append(f"peak {format_bytes(peak)}{a_rank}")
    elif bound is not None:
        words.append(f"peak at most {format_bytes(bound)}{a_rank}")
    return ", ".join(words)


def _weight(trial: Trial) -> float:
    return _FLOPS_LIKE_A_START + attention_flops(trial.workload)
