"""The cost of a sweep before it runs: number of runs, time, highest peak memory.

Rule: a run takes START_S for its processes, OTHER_PASSES untimed passes (warm-up, memory, checks),
and timed passes until `repeats` or `time_cap`; sparse attention also DENSE_PASSES of dense
attention, with which it is compared. A pass takes the predicted time (search/prediction.py). A
trial that is predicted to exceed its memory or time budget runs once, up to that budget. Only the
longest length of each implementation, options and shape has a dry run; shorter ones are scaled by
their FLOPs, and their memory is smaller.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import DryRunEstimate, Trial
from longseq_bench.core.units import format_bytes
from longseq_bench.search.memory_curve import add_outside
from longseq_bench.search.prediction import RateModel, predict_times

START_S, OTHER_PASSES, DENSE_PASSES = 0.4, 6, 2
DENSE_SHARE = 0.95
"""Share of the FLOPs of dense attention below which an implementation counts as sparse."""
MAX_DRY_RUNS = 60
"""Dry runs for all trials: of a larger grid, some kinds of each implementation have one."""
LIMIT_S = 2.0
"""Time limit of the dry runs of one implementation."""
TOTAL_S = 6.0
"""Time after which no further dry run starts."""

DryRunOf = Callable[..., list[DryRunEstimate]]


@dataclass(frozen=True)
class SweepEstimate:
    """The expected cost of a sweep.

    runs: trials times rounds.  seconds, peak_bytes: None if nothing could be predicted; the peak is
    that of one rank, at most its budget.  unknown: trials that are not part of them: most of these
    end at once as unsupported.  reason: why the first one is not.
    """

    runs: int
    seconds: float | None = None
    peak_bytes: int | None = None
    unknown: int = 0
    reason: str | None = None

    def sentence(self) -> str:
        """Return the estimate in one line."""
        if self.seconds is None or self.peak_bytes is None:
            return f"no estimate: {self.reason}"
        runs = "1 run" if self.runs == 1 else f"{self.runs:,} runs"
        line = f"{runs}, about {format_duration(self.seconds)}, "
        line += f"at most {format_bytes(self.peak_bytes)}"
        if not self.unknown:
            return line
        trials = "1 trial" if self.unknown == 1 else f"{self.unknown:,} trials"
        return f"{line}; without {trials} ({self.reason})"

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as data, in SI units."""
        return {
            "runs": self.runs, "seconds": self.seconds, "peak_bytes": self.peak_bytes,
            "unknown_trials": self.unknown, "reason": self.reason, "text": self.sentence(),
        }  # fmt: skip


Known = tuple[Trial, DryRunEstimate]


def estimate_sweep(
    trials: Sequence[Trial], rounds: int, dry_run: DryRunOf, rates: Mapping[str, RateModel],
    clock: Callable[[], float],
) -> SweepEstimate:  # fmt: skip
    """Return the expected cost of a sweep. rates: of each device. clock: seconds, ascending.

    Every trial has a memory budget.
    """
    end_s = clock() + TOTAL_S
    kinds: dict[Hashable, list[Trial]] = {}
    for trial in trials:
        kinds.setdefault(_kind(trial), []).append(trial)
    longest = [max(alike, key=lambda trial: trial.workload.seq_len) for alike in kinds.values()]
    step = math.ceil(len(longest) / MAX_DRY_RUNS)
    known: dict[Hashable, Known | str] = {}
    for (name, device), group in groupby(sorted(longest, key=_name), key=_name):
        some = list(group)[::step]
        if clock() > end_s:
            late = f"the dry runs of all implementations took more than {TOTAL_S:.0f} s"
            known |= dict.fromkeys(map(_kind, some), f"{name}: {late}")
            continue
        hardware = rates[device].hardware
        limited = add_outside(partial(dry_run, limit=LIMIT_S, **hardware.dry_run_options), hardware)
        for trial, one in zip(some, limited(some), strict=True):
            refused = one.unsupported and f"{name}: {one.unsupported}"
            known[_kind(trial)] = refused or (trial, one)
    return _add_up(kinds, rounds, known, rates)


def _add_up(
    kinds: Mapping[Hashable, Sequence[Trial]], rounds: int,
    known: Mapping[Hashable, Known | str], rates: Mapping[str, RateModel],
) -> SweepEstimate:  # fmt: skip
    """Add the time of all runs, and find the highest peak. kinds: the trials of each kind."""
    by_name = {_name(one[0]): one for one in known.values() if not isinstance(one, str)}
    seconds, peak, unknown, reason = 0.0, 0, 0, None
    count = sum(map(len, kinds.values()))
    passes: dict[int, float] = {}  # by the id of what is known, which several kinds may share
    for kind, trials in kinds.items():
        # of a kind without a dry run of its own, take another one of the implementation
        like: Known | str | None = known.get(kind) or by_name.get(_name(trials[0]))
        like = like or f"{trials[0].implementation}: nothing of it was predicted"
        if isinstance(like, str):
            unknown, reason = unknown + len(trials), reason or like
            seconds += START_S * len(trials)
            continue
        device_rates = rates[trials[0].device]
        if id(like) not in passes:
            passes[id(like)] = predict_times(*like, device_rates).total
        took_s, needed = _add_kind(trials, *like, passes[id(like)], device_rates, rounds)
        seconds, peak = seconds + took_s, max(peak, needed)
    if unknown == count:
        return SweepEstimate(count * rounds, unknown=unknown, reason=reason)
    return SweepEstimate(count * rounds, seconds, peak, unknown, reason)


def _add_kind(
    trials: Sequence[Trial], like: Trial, estimate: DryRunEstimate, like_pass_s: float,
    rates: RateModel, rounds: int,
) -> tuple[float, int]:  # fmt: skip
    """Return the time of all runs of the trials of a kind, and the highest peak.

    like, estimate: one of them, or of a similar kind, and what its dry run says. like_pass_s: the
    time of its pass.
    """
    like_flops = attention_flops(like.workload) / like.world_size
    dense_s_per_flop, seconds, peak = 0.0, 0.0, 0
    if estimate.flops <= DENSE_SHARE * like_flops:
        workload = trials[0].workload
        dense_s_per_flop = DENSE_PASSES / rates.hardware.rate(workload.dtype, workload.mode)
    for trial in trials:
        flops = attention_flops(trial.workload) / trial.world_size
        pass_s = like_pass_s * flops / like_flops
        dense_s = flops * dense_s_per_flop
        needed = round(estimate.budget_bytes * trial.workload.seq_len / like.workload.seq_len)
        budget = trial.memory_budget or needed
        seconds += _run_seconds(trial, pass_s, dense_s, rounds, fits=needed <= budget)
        peak = max(peak, min(needed, budget))
    return seconds, peak


def _run_seconds(trial: Trial, pass_s: float, dense_s: float, rounds: int, fits: bool) -> float:
    """Return the time of all rounds of a trial. One that fails has no further rounds."""
    if not fits:
        return START_S
    if trial.time_budget and pass_s > trial.time_budget:
        return START_S + trial.time_budget
    timed = min(trial.repeats * pass_s, trial.time_cap + pass_s)
    return rounds * (START_S + OTHER_PASSES * pass_s + dense_s + timed)


def _name(trial: Trial) -> tuple[str, str]:
    return trial.implementation, trial.device


def _kind(trial: Trial) -> Hashable:
    """Return what is equal for trials that differ in length and in settings of the timing only."""
    return trial.key_without(
        "seq_len", "repeats", "time_cap", "time_budget", "memory_budget", "seed", "round"
    )


def format_duration(seconds: float) -> str:
    """Format an estimated time roughly: "40 s", "6 min", "2.5 h", "900 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds)):.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"
