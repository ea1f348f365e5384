"""Longest length on several ranks as a fraction of the floor: `python benchmarks/ranks.py`.

Runs `longseq maxlen` on 1, 2 and 4 ranks with one budget per rank. Prints the longest length, its
fraction of the theoretical maximum (floor), the least fraction that passes, and its growth with
ranks. Takes some minutes on two cores.
Options: --memory-budget 64MiB --dtype float32 --worlds 1,2,4.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

CASES: list[tuple[str, list[str], str, float | None]] = [
    ("ring", [], "forward", 0.85),
    ("ring", [], "train", 0.65),
    ("collective", ["chunk=512"], "forward", 0.75),
    ("collective", ["chunk=512"], "train", None),
    ("collective", [], "forward", None),
    ("ulysses", [], "forward", 0.60),
    ("ulysses", [], "train", None),
    ("usp", [], "forward", None),
    ("ring", ["queries=full"], "forward", None),
    ("ring", ["queries=full"], "train", None),
]
"""Implementation, options, mode, and the least fraction of the floor on several ranks."""

GROWS = {4: 3.7}
"""Least ratio of the longest length to that on one rank, by number of ranks; ring, forward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="64MiB")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--worlds", default="1,2,4")
    args = parser.parse_args()
    worlds = [int(world) for world in args.worlds.split(",")]
    print(f"{args.dtype}, 8 heads of 64, {args.memory_budget} a rank, CPU")
    layout = "{:<24} {:<8} {:>5} {:>9} {:>11} {:>8} {:>6} {:>10} {:>9} {:>5} {:>7}"
    head = ("", "mode", "ranks", "longest", "limited by", "of floor", "goal", "× one rank")
    print(layout.format(*head, "imbalance", "runs", "wall s"))
    missed = 0
    for name, options, mode, least in CASES:
        alone = None
        for world in worlds:
            row = maximum(name, options, mode, world, args.memory_budget, args.dtype)
            longest = row["max_tokens"]
            alone = longest if world == 1 else alone
            grown = longest / alone if alone else None
            good = world == 1 or least is None or row["fraction_of_floor"] >= least
            if [name, mode, options] == ["ring", "forward", []] and grown is not None:
                good = good and grown >= GROWS.get(world, 0)
            missed += not good
            cells = (
                " ".join([name, *options]), mode, world, longest, row["limited_by"],
                f"{row['fraction_of_floor']:.3f}", "" if least is None else f"{least:.2f}",
                "" if grown is None else f"{grown:.2f}", f"{row.get('imbalance') or 1:.2f}",
                row["runs"], f"{row['wall_s']:.1f}",
            )  # fmt: skip
            print(layout.format(*map(str, cells)) + ("" if good else "  below"), flush=True)
    sys.exit(1 if missed else 0)


def maximum(
    name: str, options: list[str], mode: str, world: int, budget: str, dtype: str
) -> dict[str, Any]:
    """Return the result of one `longseq maxlen --json`."""
    command = [sys.executable, "-m", "longseq_bench", "maxlen", "--json", "--device", "cpu"]
    command += ["--impl", name, "--world-size", str(world), "--mode", mode]
    for option in options:
        command += ["-o", option]
    command += ["--memory-budget", budget, "--dtype", dtype, "--heads", "8", "--head-dim", "64"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--out", folder], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results[0]


if __name__ == "__main__":
    main()
