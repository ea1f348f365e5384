"""Longest length as a fraction of the floor: `python benchmarks/floor.py`.

Runs `longseq maxlen` for every implementation, forward and train. Prints the longest length, its
fraction of the theoretical maximum (floor), the minimum that passes, and the runs.
Takes about a minute on two cores. Options: --memory-budget 64MiB --dtype float32.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

IMPLEMENTATIONS = ("sdpa", "ring", "collective", "block-sparse", "hilbert", "dilated")
MIN_FLOOR_SHARE = {
    "forward": dict.fromkeys(IMPLEMENTATIONS[:4], 0.90) | {"hilbert": 0.80, "dilated": 0.80},
    "train": dict.fromkeys(IMPLEMENTATIONS[:3], 0.80)
    | {"block-sparse": 0.60, "hilbert": 0.60, "dilated": 0.60},
}
MAX_RUNS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="64MiB")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    print(f"{args.dtype}, 8 heads of 64, budget {args.memory_budget}, CPU")
    head = ("", "mode", "longest", "failed at", "limited by", "of floor", "goal", "runs", "wall s")
    layout = "{:<13} {:<8} {:>9} {:>9} {:>11} {:>8} {:>6} {:>5} {:>7}"
    print(layout.format(*head))
    missed = 0
    for mode, min_share in MIN_FLOOR_SHARE.items():
        for row in maxima(mode, args.memory_budget, args.dtype):
            floor, name = row["fraction_of_floor"], row["implementation"]
            good = floor >= min_share[name] and row["runs"] <= MAX_RUNS
            missed += not good
            cells = (
                name, mode, row["max_tokens"], row["first_failure"], row["limited_by"],
                f"{floor:.3f}", f"{min_share[name]:.2f}", row["runs"], f"{row['wall_s']:.1f}",
            )  # fmt: skip
            print(layout.format(*map(str, cells)) + ("" if good else "  below the goal"))
    sys.exit(1 if missed else 0)


def maxima(mode: str, budget: str, dtype: str) -> list[dict[str, Any]]:
    """Return the results of one `longseq maxlen --json` over all implementations."""
    command = [sys.executable, "-m", "longseq_bench", "maxlen", "--json", "--device", "cpu"]
    for name in IMPLEMENTATIONS:
        command += ["--impl", name]
    command += ["--memory-budget", budget, "--dtype", dtype, "--heads", "8", "--head-dim", "64"]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--mode", mode, "--out", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


if __name__ == "__main__":
    main()
