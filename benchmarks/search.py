"""Runs of a search against doubling and bisection to the same bracket.

    python benchmarks/search.py

Twelve cases on a CPU: three implementations, two modes, two memory budgets. Each is searched both
ways in turn, from nothing. A run is a process, confirmations included; seconds cover the whole
search, predictions included. The exit code is 1 if longseq takes more than 5 runs on average or
more than 8 in any case, or if plain bisection takes less than 3 times as long in total. The ratio
without the shortest runs of plain bisection is printed too. Two further cases are limited by time;
they do not count, since noise decides how many runs they take.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

from longseq_bench.analysis.searches import search_rows
from longseq_bench.core.hardware import this_cpu
from longseq_bench.core.model import Mode, Trial, Workload
from longseq_bench.environment import collect
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.runner import run_schedule
from longseq_bench.search.bracket import tolerance
from longseq_bench.search.prediction import Predictor
from longseq_bench.search.rates import RateModel
from longseq_bench.search.strategy import maxlen

MIB = 2**20
MODES: tuple[Mode, ...] = ("forward", "train")
Case = tuple[str, dict[str, Any], Mode, int, float | None]
"""Implementation, options, mode, memory budget in bytes, time budget of a pass in seconds."""

IMPLEMENTATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ring", {}),
    ("block-sparse", {"sparsity": 0.99}),
    ("hilbert", {}),
)
TWELVE: list[Case] = [
    (name, options, mode, budget * MIB, None)
    for name, options in IMPLEMENTATIONS
    for mode in MODES
    for budget in (32, 64)
]
TIMED: list[Case] = [
    ("sdpa", {}, "forward", 2048 * MIB, 1.0),
    ("block-sparse", {"sparsity": 0.9}, "forward", 2048 * MIB, 0.5),
]

STARTS = (64, 512)
"""Doubling starts at 1 token; the ratio is also printed for doubling from these lengths."""

MAX_MEAN_RUNS, MAX_RUNS, MIN_RATIO = 5.0, 8, 3.0


def search_bracket(
    trial: Trial, launcher: Launcher, rates: RateModel
) -> tuple[int, int, int | None]:
    """Search with longseq; return the number of runs and the bracket."""
    predictor = Predictor(launcher.dry_run, rates)
    records = run_schedule(maxlen([trial], None, predictor), launcher, None, collect)
    (row,) = search_rows(records)
    return len(records), row.max_tokens, row.first_failure


Ran = list[tuple[int, float]]
"""Tokens and wall seconds of each run."""


def plain(trial: Trial, launcher: Launcher) -> tuple[Ran, int, int]:
    """Double until a length fails, bisect to the same tolerance, confirm with every row checked."""
    runs: Ran = []

    def passes(tokens: int, round: int = 0) -> bool:
        start, one = time.perf_counter(), trial.at(tokens).replace(round=round)
        status = launcher.run(one, lambda phase, part: None).outcome.status
        runs.append((tokens, time.perf_counter() - start))
        return status == "ok"

    low, high = 0, 1
    while passes(high):
        low, high = high, 2 * high
    while high - low > tolerance(low):
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    passes(low, round=1)
    return runs, low, high


def both(case: Case, launcher: Launcher, rates: RateModel) -> tuple[int, float, Ran]:
    """Search one case both ways and print it; return our runs, our seconds, the plain runs."""
    name, options, mode, budget, seconds = case
    trial = Trial(
        implementation=name, options=launcher.catalogue().options(name, options),
        workload=Workload(seq_len=1, mode=mode), memory_budget=budget, time_budget=seconds,
        repeats=0,
    )  # fmt: skip
    start = time.perf_counter()
    runs, low, high = search_bracket(trial, launcher, rates)
    middle = time.perf_counter()
    other, plain_low, plain_high = plain(trial, launcher)
    took, plain_took = middle - start, time.perf_counter() - middle
    limit = f" {seconds:g} s" if seconds else ""
    print(
        f"{f'{name} {mode} {budget // MIB} MiB{limit}':36} {runs:4}  {low:>7,} to {high or 0:>7,} "
        f"{took:6.1f}      {len(other):4}  {plain_low:>7,} to {plain_high:>7,} {plain_took:6.1f}  "
        f"{plain_took / took:6.2f}",
        flush=True,
    )
    return runs, took, other


def _later(ratio: Callable[[int], float]) -> str:
    return ", ".join(f"{ratio(start):.2f} from {start} tokens" for start in STARTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    here = collect()
    rates = RateModel(this_cpu(here.cpu, here.cores, here.memory_bytes))
    print("case, float32                        runs  bracket                 s      plain: "
          "bracket                 s  times ours")  # fmt: skip
    with LocalLauncher() as launcher:
        found = [both(case, launcher, rates) for case in TWELVE]
        counts, seconds, others = zip(*found, strict=True)
        plain_runs = [run for other in others for run in other]

        def ratio(start: int) -> float:
            return float(sum(s for n, s in plain_runs if n >= start) / sum(seconds))

        print(f"{mean(counts):.2f} runs on average, {max(counts)} at most; {sum(seconds):.1f} s "
              f"against {ratio(1) * sum(seconds):.1f} s in {len(plain_runs) / len(found):.1f}: "
              f"{ratio(1):.2f} times, {_later(ratio)}")  # fmt: skip
        for case in TIMED:
            both(case, launcher, rates)
    good = mean(counts) <= MAX_MEAN_RUNS and max(counts) <= MAX_RUNS and ratio(1) >= MIN_RATIO
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
