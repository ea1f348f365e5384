"""Time and memory to build block layouts of 16M tokens: `python benchmarks/layouts.py`.

Every pattern at block 128 with 16 blocks a row, causal and not. The timed steps are building the
layout with its own check, and `visible_pairs` with `block_density`. Each runs in a fresh process on
one core. Seconds are the median over rounds; memory is the peak above that of the imports (VmHWM,
Linux only). Takes half a minute. Options: --tokens 16M --block 128 --kept 16 --rounds 3.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from longseq_bench.core.units import parse_tokens
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from longseq_bench.patterns.spans import spans_of

MAX_S, MAX_MIB = 1.0, 256.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16M")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--kept", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokens = parse_tokens(args.tokens)
    sparsity = 1 - args.kept * args.block / tokens
    if args.one:
        pattern, causality = args.one.split(",")
        print(json.dumps(measured(pattern, tokens, args.block, sparsity, causality == "causal")))
        return
    print(f"{tokens:,} tokens, block {args.block}, sparsity {sparsity:.6f}, one core")
    row = "{:<16} {:<8} {:>10} {:>8} {:>12} {:>10} {:>10}"
    print(row.format("pattern", "", "kept", "make s", "properties s", "spans s", "peak MiB"))
    missed = 0
    for pattern in PATTERNS:
        for causality in ("", "causal"):
            runs = [fresh(f"{pattern},{causality}") for _ in range(args.rounds)]
            middle = {key: median(run[key] for run in runs) for key in runs[0]}
            good = middle["make"] + middle["properties"] < MAX_S and middle["mib"] < MAX_MIB
            missed += not good
            cells = (
                f"{middle['kept']:.0f}", f"{middle['make']:.3f}", f"{middle['properties']:.3f}",
                f"{middle['spans']:.3f}", f"{middle['mib']:.0f}",
            )  # fmt: skip
            line = row.format(pattern, causality, *cells)
            print(line + ("" if good else "  too much"), flush=True)
    sys.exit(1 if missed else 0)


def fresh(one: str) -> dict[str, float]:
    """Run one measurement in a new process with the same options."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", one]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(
    pattern: str, tokens: int, block: int, sparsity: float, causal: bool
) -> dict[str, Any]:
    """Return the seconds of each step and the peak in MiB, which excludes the spans."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # reset the peak: that of the imports could be higher
    Path("/proc/self/clear_refs").write_text("5")
    idle = status("VmRSS")
    times = [time.perf_counter()]
    layout = make_layout(pattern, tokens, block, sparsity, causal)
    times.append(time.perf_counter())
    _ = layout.visible_pairs, layout.block_density
    times.append(time.perf_counter())
    peak = status("VmHWM") - idle
    spans_of(layout)
    times.append(time.perf_counter())
    make, properties, spans = (b - a for a, b in itertools.pairwise(times))
    kept = len(layout.indices)
    return {
        "make": make, "properties": properties, "spans": spans, "mib": peak / 1024, "kept": kept
    }  # fmt: skip


def status(name: str) -> int:
    """Return a value of this process's status file, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise OSError(f"no {name} in /proc/self/status")


if __name__ == "__main__":
    main()
