"""The cost of a sweep before it runs, in one line: number of runs, time, highest peak memory.

A run takes START_S for its processes, OTHER_PASSES untimed passes (warm-up, memory, checks), and
timed passes until `repeats` or `time_cap`. A trial that is predicted to exceed its memory or time
budget runs once, up to that budget. Only the longest length of each implementation, options and
shape has a dry run; shorter ones are scaled by their FLOPs, and their memory is smaller.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from longseq_bench.analysis.runs import group_by
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import DryRunEstimate, Trial
from longseq_bench.core.units import format_bytes, format_seconds
from longseq_bench.search.memory_curve import add_outside
from longseq_bench.search.prediction import predict_times
from longseq_bench.search.rates import RateModel

START_S, OTHER_PASSES = 0.4, 6
MAX_DRY_RUNS, LIMIT_S = 60, 2.0
"""Dry runs for all trials, and the time limit of one (s)."""
_ALIKE = "seq_len", "repeats", "time_cap", "time_budget", "memory_budget", "seed", "round"
"""What differs between trials of one kind: the length, and settings of the timing."""


@dataclass(frozen=True)
class SweepEstimate:
    """The expected cost of a sweep; seconds, peak_bytes: None if nothing could be predicted.

    runs: trials times rounds.  unknown_trials: those that are not part of the cost.  reason: why
    the first one is not.
    """

    runs: int
    seconds: float | None = None
    peak_bytes: int | None = None
    unknown_trials: int = 0
    reason: str | None = None

    def sentence(self) -> str:
        """Return the estimate in one line."""
        if self.seconds is None or self.peak_bytes is None:
            return f"no estimate: {self.reason}"
        time, peak = format_seconds(max(1, round(self.seconds))), format_bytes(self.peak_bytes)
        line = f"{self.runs:,} runs, about {time}, at most {peak}"
        missing = f"; without {self.unknown_trials:,} of the trials ({self.reason})"
        return line + missing if self.unknown_trials else line

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as data, in SI units."""
        return {**asdict(self), "text": self.sentence()}


def run_seconds(trial: Trial, pass_s: float) -> float:
    """Return the seconds of a run that passes. pass_s: of one pass."""
    timed_s = min(trial.repeats * pass_s, trial.time_cap + pass_s)
    return START_S + OTHER_PASSES * pass_s + timed_s


def estimate_sweep(
    trials: Sequence[Trial],
    rounds: int,
    dry_run: Callable[..., list[DryRunEstimate]],
    rates: Mapping[str, RateModel],
) -> SweepEstimate:
    """Return the expected cost of a sweep. rates: of each device."""
    kinds = list(group_by(trials, lambda trial: trial.key_without(*_ALIKE)).values())
    seconds, peak, unknown, reason = 0.0, 0, 0, None
    for i, alike in enumerate(kinds):
        longest, rate = max(alike, key=lambda trial: trial.workload.seq_len), rates[alike[0].device]
        refused = f"only {MAX_DRY_RUNS} kinds of trials are predicted"
        if i < MAX_DRY_RUNS:
            limited = partial(dry_run, limit=LIMIT_S, capability=rate.hardware.capability)
            (one,) = add_outside(limited, rate.hardware)([longest])
            refused = one.unsupported or ""
        if refused:
            unknown, reason = unknown + len(alike), reason or f"{longest.implementation}: {refused}"
            continue
        longest_s = predict_times(longest, one, rate).total
        for trial in alike:
            share = attention_flops(trial.workload) / attention_flops(longest.workload)
            needed = round(one.budget_bytes * trial.workload.seq_len / longest.workload.seq_len)
            budget = trial.memory_budget or needed
            peak = max(peak, min(needed, budget))
            pass_s = longest_s * share
            if needed > budget:  # a trial that fails has no further rounds
                seconds += START_S
            elif trial.time_budget and pass_s > trial.time_budget:
                seconds += START_S + trial.time_budget
            else:
                seconds += rounds * run_seconds(trial, pass_s)
    if trials and unknown == len(trials):
        return SweepEstimate(len(trials) * rounds, unknown_trials=unknown, reason=reason)
    return SweepEstimate(len(trials) * rounds, seconds, peak, unknown, reason)
