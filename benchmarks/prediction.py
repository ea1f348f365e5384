"""Predicted against measured peaks, maxima and times: `python benchmarks/prediction.py`.

Peaks: each implementation, forward and train, on one rank and two, at three lengths, float32.
Maxima: the result of a search under 64 MiB a rank against its prediction. Times: rates fitted to
runs at one length, checked on runs at twice that length, both medians of several passes. The last
column is predicted / measured - 1. The exit code is 1 if one exceeds its limit (memory 3 %,
sdpa 5 %, maxima 3 %, times 25 %).
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from longseq_bench.analysis.searches import search_rows
from longseq_bench.core.hardware import this_cpu
from longseq_bench.core.model import Mode, Record, Trial, Workload
from longseq_bench.environment import collect
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.runner import run_schedule
from longseq_bench.search.prediction import (
    CEILING_TOKENS,
    Predictor,
    find_longest_fit,
    predict,
)
from longseq_bench.search.rates import RateModel
from longseq_bench.search.strategy import maxlen

MIB = 2**20
LONG, SHORT = (4096, 8192, 16384), (1024, 2048, 3072)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "dense": ({}, SHORT, 1),
    "sdpa": ({}, LONG, 1),
    "ring": ({}, LONG, 2),
    "collective": ({}, LONG, 2),
    "ulysses": ({}, LONG, 2),
    "block-sparse": ({"sparsity": 0.9}, LONG, 2),
    "hilbert": ({}, LONG, 2),
    "dilated": ({}, LONG, 2),
}
"""Options, lengths and maximum number of ranks by implementation."""

MODES: tuple[Mode, ...] = ("forward", "train")
MEMORY_LIMIT, SDPA_LIMIT, TIME_LIMIT = 0.03, 0.05, 0.25


def trials(
    launcher: Launcher, dtype: str, budget: int, min_ranks: int = 1
) -> Iterator[tuple[Trial, tuple[int, ...]]]:
    catalogue = launcher.catalogue()
    for name, (options, lengths, max_ranks) in CASES.items():
        for mode in MODES:
            for ranks in range(min_ranks, max_ranks + 1):
                shape = Workload(seq_len=1024, mode=mode, dtype=dtype)
                yield Trial(
                    implementation=name, options=catalogue.options(name, options), workload=shape,
                    world_size=ranks, memory_budget=budget, repeats=0,
                ), lengths  # fmt: skip


def memory_limit(name: str) -> float:
    return SDPA_LIMIT if name == "sdpa" else MEMORY_LIMIT


def row(
    trial: Trial, tokens: int, predicted: float, measured: float, limit: float, unit: float
) -> bool:
    error = predicted / measured - 1
    w = trial.workload
    flag = "" if abs(error) <= limit else "  <-- beyond"
    print(
        f"{trial.implementation:14} {w.mode:8} {w.dtype:9} {trial.world_size:2} {tokens:8,} "
        f"{predicted / unit:10.3f} {measured / unit:10.3f} {100 * error:+7.2f} %{flag}",
        flush=True,
    )
    return abs(error) <= limit


def peaks(launcher: Launcher, dtype: str) -> bool:
    print("\npeak of the fullest rank, MiB: predicted, measured, off", flush=True)
    good = True
    for trial, lengths in trials(launcher, dtype, 8 * 2**30):
        estimates = launcher.dry_run([trial.at(n) for n in lengths])
        for n, estimate in zip(lengths, estimates, strict=True):
            outcome = launcher.run(trial.at(n), lambda phase, part: None).outcome
            peak = outcome.largest("peak")
            if estimate.unsupported or not peak:
                print(f"{trial.implementation} {n}: {estimate.unsupported or outcome.reason}")
                good = False
                continue
            good &= row(
                trial, n, estimate.peak_bytes, peak, memory_limit(trial.implementation), MIB
            )
    return good


def maxima(launcher: Launcher, dtype: str, rates: RateModel, budget: int) -> bool:
    print(
        f"\nlongest under {budget // MIB} MiB a rank, tokens: predicted, measured, off", flush=True
    )
    good, predictor = True, Predictor(launcher.dry_run, rates)
    for trial, _ in trials(launcher, dtype, budget):
        one = find_longest_fit(trial, launcher.dry_run, rates, CEILING_TOKENS)
        assert not isinstance(one, str), one
        records = run_schedule(maxlen([trial], None, predictor), launcher, None, collect)
        (found,) = search_rows(records)
        tokens = one.trial.workload.seq_len
        good &= row(trial, len(records), tokens, found.max_tokens, MEMORY_LIMIT, 1)
    return good


def pass_times(launcher: Launcher, dtype: str, min_ranks: int) -> bool:
    print("\none pass, s, at twice the calibrated length: predicted, measured, off", flush=True)
    good, here = True, collect()
    cpu = this_cpu(here.cpu, here.cores, here.memory_bytes)
    for trial, lengths in trials(launcher, dtype, 8 * 2**30, min_ranks):
        tokens = lengths[-1]
        records = []
        for n in (tokens // 2, tokens):
            run = trial.at(n).replace(repeats=7, time_cap=5.0)
            outcome = launcher.run(run, lambda phase, part: None).outcome
            records.append(Record(
                trial=run, outcome=outcome, environment=here, started_at="", wall_s=0.0
            ))  # fmt: skip
        result = predict(trial.at(tokens), launcher.dry_run, RateModel(cpu, records[:1]))
        times = sorted(records[1].outcome.samples("time"))
        assert not isinstance(result, str), result
        good &= row(trial, tokens, result.times.total, times[len(times) // 2], TIME_LIMIT, 1)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", choices=["peaks", "maxima", "times"])
    parser.add_argument("--budget", type=int, default=64, help="MiB a rank, of maxima")
    parser.add_argument("--ranks-from", type=int, default=1, help="of times: leave out fewer")
    args = parser.parse_args()
    here = collect()
    rates = RateModel(this_cpu(here.cpu, here.cores, here.memory_bytes))
    good = True
    with LocalLauncher() as launcher:
        if args.only in (None, "peaks"):
            good &= peaks(launcher, args.dtype)
        if args.only in (None, "maxima"):
            good &= maxima(launcher, args.dtype, rates, args.budget * MIB)
        if args.only in (None, "times"):
            good &= pass_times(launcher, args.dtype, args.ranks_from)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
