"""Two checkouts side by side: `python -m benchmarks.commits --before PATH --after PATH`.

Each round runs the same commands with both, the first one first in even rounds:

1. Searches for the longest length, in the first round only: share of the floor, and runs.
2. Times of sdpa, ring over two ranks and block-sparse attention, and its share of ideal.
3. The wall time of a sweep of 20 short trials, one pass each, start and report included.
4. `longseq --help`: wall and CPU time.

Printed: each figure as it comes, then medians of both, their ratio, and the smallest and largest
ratio of a round. A round takes about two minutes. Options: --rounds 7.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

TIMES = """
device: cpu
workload: {heads: 8, head_dim: 64}
tokens: 4k
implementations:
  - sdpa
  - block-sparse: {sparsity: 0.9}
repeats: 20
"""
RING = """
device: cpu
world_size: 2
workload: {heads: 8, head_dim: 64}
tokens: 4k
implementations: ring
repeats: 20
"""
STARTS = """
device: cpu
workload: {heads: 1, head_dim: 16}
tokens: 64
implementations: sdpa
repeats: 0
rounds: 20
"""
SEARCHES = {
    "sdpa": ["--impl", "sdpa", "--memory-budget", "64MiB"],
    "ring, train": ["--impl", "ring", "--memory-budget", "64MiB", "--mode", "train"],
    "block-sparse": ["--impl", "block-sparse", "--memory-budget", "64MiB"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    trees = {"before": asked.before.resolve(), "after": asked.after.resolve()}
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(asked.rounds):
        for side in sorted(trees, reverse=number % 2 == 0):
            for name, value in measure(trees[side], number == 0).items():
                figures[name][side].append(value)
                print(f"{number + 1} {side:6} {name:34} {value:10.4g}", file=sys.stderr, flush=True)
    print(f"{'':34} {'before':>10} {'after':>10} {'ratio':>7}  of one round")
    for name, sides in figures.items():
        before, after = (median(sides[side]) for side in ("before", "after"))
        ratios = [b / a for a, b in zip(sides["before"], sides["after"], strict=True) if a]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{name:34} {before:10.4g} {after:10.4g} {after / before:7.3f}  {spread}")


def measure(tree: Path, with_searches: bool) -> dict[str, float]:
    """Return the figures of one checkout; searches, which vary little, once."""
    found: dict[str, float] = {}
    for config in (TIMES, RING):
        with tempfile.TemporaryDirectory() as folder:
            for row in sweep(tree, Path(folder), config):
                found[f"{row['implementation']} at 4k, s"] = row["time_s"]
                if share := row.get("share_of_ideal"):
                    found["block-sparse, share of ideal"] = share
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.monotonic()
        sweep(tree, Path(folder), STARTS, show=False)
        found["sweep of 20 short trials, s"] = time.monotonic() - start_s
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.monotonic()
    run(tree, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["--help, wall s"] = time.monotonic() - start_s
    found["--help, CPU s"] = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    if with_searches:
        for name, options in SEARCHES.items():
            with tempfile.TemporaryDirectory() as folder:
                text = run(tree, "maxlen", *options, "--device", "cpu", "--out", folder, "--json")
            (row,) = json.loads(text)["results"]
            found[f"maxlen {name}: share of the floor"] = row["fraction_of_floor"]
            found[f"maxlen {name}: runs"] = row["runs"]
    return found


def sweep(tree: Path, folder: Path, config: str, show: bool = True) -> list[dict[str, Any]]:
    """Run a sweep and return its rows."""
    file, out = folder / "sweep.yaml", folder / "out"
    file.write_text(config, encoding="utf-8")
    run(tree, "sweep", str(file), "--out", str(out))
    rows: list[dict[str, Any]] = (
        json.loads(run(tree, "show", str(out), "--json"))["rows"] if show else []
    )
    return rows


def run(tree: Path, *arguments: str) -> str:
    """Run a command of this checkout and return what it prints."""
    command = [sys.executable, "-m", "longseq_bench", *arguments]
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
