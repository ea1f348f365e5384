"""Measure what checking costs in a trial, and whether it changes timed passes.

    python benchmarks/check.py                     # the shares
    python benchmarks/check.py --before FOLDER     # also times, next to those of another checkout

1. Every trial of configs/quickstart.yaml: wall time of its process, and the part in the phase
   "check" (without the passes of the dense baseline and the rate of products, which have that
   phase too). Goal: at most 20 % of the time of all.
2. The first trial of configs/sparse-long.yaml, a million tokens. Goal: at most 10 %.
3. --before: `longseq sweep configs/quickstart.yaml` there and here in turn, --rounds times; the
   ratio of each trial's median times.

The exit code is 1 above a goal. Options: --rounds 3, --skip-long.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

from longseq_bench.config.loader import load_config
from longseq_bench.config.trials import make_sweep
from longseq_bench.core.model import Trial
from longseq_bench.core.units import format_share
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.local import LocalLauncher

ROOT = Path(__file__).parents[1]
QUICKSTART, LONG = ROOT / "configs/quickstart.yaml", ROOT / "configs/sparse-long.yaml"
MAX_SHARE, MAX_LONG_SHARE = 0.20, 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-long", action="store_true")
    args = parser.parse_args()
    with LocalLauncher() as launcher:
        quickstart = make_sweep(load_config(QUICKSTART), launcher.catalogue())
        trials = [trial for trial in quickstart.trials if not trial.round]
        good = goal("quickstart", [seconds(launcher, t) for t in trials], MAX_SHARE)
        if not args.skip_long:
            long = make_sweep(load_config(LONG), launcher.catalogue()).trials[0]
            good &= goal("a million tokens", [seconds(launcher, long)], MAX_LONG_SHARE)
    if args.before:
        compare(args.before, args.rounds)
    sys.exit(0 if good else 1)


def goal(name: str, found: list[tuple[float, float]], allowed: float) -> bool:
    """Print the share of the time of all trials, and return whether it keeps its goal."""
    share = sum(checking for checking, _ in found) / sum(total for _, total in found)
    of_one = [checking / total for checking, total in found]
    ends = ", ".join(format_share(of(of_one)) for of in (median, min, max))
    print(f"{name}: {format_share(share)} of the wall time is checking (at most "
          f"{format_share(allowed)}); of a trial, median, least, most: {ends}",
          flush=True)  # fmt: skip
    return share <= allowed


def seconds(launcher: Launcher, trial: Trial) -> tuple[float, float]:
    """Run a trial and return the seconds in which it checks, and those of all."""
    begun: list[tuple[float, bool]] = [(time.perf_counter(), False)]

    def on_phase(phase: str, part: str) -> None:
        is_check = phase == "check" and not part.startswith(("dense pass", "matmul_rate"))
        begun.append((time.perf_counter(), is_check))

    status = launcher.run(trial, on_phase).outcome.status
    begun.append((time.perf_counter(), False))
    checking = sum(b[0] - a[0] for a, b in pairwise(begun) if a[1])
    total = begun[-1][0] - begun[0][0]
    print(f"  {trial.implementation} {trial.workload.seq_len:,}: {status}, {total:.2f} s, "
          f"checking {checking:.2f} s, {format_share(checking / total)}", flush=True)  # fmt: skip
    return checking, total


def compare(before: Path, rounds: int) -> None:
    """Print the ratio of the times of each trial, now over before."""
    times: dict[Path, dict[str, list[float]]] = {p: defaultdict(list) for p in (before, ROOT)}
    for n in range(rounds):
        for folder in (before, ROOT) if n % 2 else (ROOT, before):
            sweep(folder.resolve(), times[folder])
    ratios = []
    for name, now in times[ROOT].items():
        then = times[before].get(name, [])
        if not (now and then):
            continue
        ratios.append(median(now) / median(then))
        print(f"  {name}: {median(then) * 1e3:.2f} ms before, {median(now) * 1e3:.2f} ms now, "
              f"ratio {ratios[-1]:.3f}")  # fmt: skip
    print(f"timed passes, now over before: median {median(ratios):.3f}, "
          f"{min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip


def sweep(folder: Path, times: dict[str, list[float]]) -> None:
    """Run the sweep with a checkout's package and add the samples of each trial."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "longseq_bench", "sweep", str(QUICKSTART), "--out", out]
        subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )  # fmt: skip
        for line in Path(out, "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            trial = record["trial"]
            name = f"{trial['implementation']} {trial['workload']['seq_len']}"
            for one in record["outcome"]["measurements"]:
                if one["name"] == "time":
                    times[name] += one["samples"]


if __name__ == "__main__":
    main()
