"""Workers side by side: `python -m benchmarks.workers` (fake GPUs) and `--quickstart` (two cores).

Fake GPUs are processes that sleep. 72 trials of equal time on 8 workers are compared with one
worker; unequal ones with the best packing, which no schedule can beat: the larger of the longest
part and the sum over the workers. Times are those between the first start and the last end of a
trial, and of the whole command. The exit code is 1 if a figure is over its limit.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import longseq_bench
from longseq_bench.core.model import Record

PLUGINS = Path(__file__).parents[1] / "tests" / "plugins"
EQUAL_LIMIT, PACKING_LIMIT, QUICKSTART_LIMIT = 1 / 7.5, 1.1, 0.6
LENGTHS = [64 * i for i in range(1, 25)]
"""24 workloads, each of three implementations: 72 trials."""


def sweep(workers: int, **given: Any) -> tuple[float, list[Record]]:
    """Return the seconds of a sweep in memory, and its records."""
    start_s = time.monotonic()
    found = longseq_bench.sweep(workers=workers, progress=False, **given)
    return time.monotonic() - start_s, list(found.records)


def fake(workers: int, seconds: float, unit: int | None) -> tuple[float, list[Record]]:
    """Run 72 trials on fake GPUs. unit: tokens that take these seconds; None: all take them."""
    os.environ |= {"FAKE_SECONDS": str(seconds)} | ({"FAKE_UNIT": str(unit)} if unit else {})
    if not unit:
        os.environ.pop("FAKE_UNIT", None)
    return sweep(
        workers, tokens=LENGTHS, implementations=["ring", "sdpa", "ulysses"], device="cuda",
        rounds=1, memory_budget="1GiB",
    )  # fmt: skip


def spans(records: Sequence[Record]) -> dict[int, float]:
    """Return the busy seconds of each part."""
    found: dict[int, float] = defaultdict(float)
    for record in records:
        found[record.part or 0] += record.wall_s
    return found


def between(records: Sequence[Record]) -> float:
    """Return the seconds from the first start to the last end of a trial, to a second."""
    starts = [datetime.fromisoformat(r.started_at).timestamp() for r in records]
    ends = [start + r.wall_s for start, r in zip(starts, records, strict=True)]
    return max(ends) - min(starts)


def measure_fake(seconds: float) -> bool:
    """Print the figures of fake GPUs; return whether they are within their limits."""
    os.environ |= {"LONGSEQ_LAUNCHER": "fake-devices", "FAKE_DEVICES": "8"}
    alone_s, records = fake(1, seconds, None)
    busy_s = sum(r.wall_s for r in records)
    beside_s, records = fake(8, seconds, None)
    share = between(records) / busy_s
    print(f"equal:   one worker {busy_s:6.1f} s of trials, {alone_s:6.1f} s of command")
    print(f"         8 workers  {between(records):6.1f} s of trials, {beside_s:6.1f} s of command")
    print(
        f"         {share:.4f} of one worker, limit {EQUAL_LIMIT:.4f}; "
        f"command {beside_s / alone_s:.4f}"
    )
    whole_s, records = fake(8, 2 * seconds, statistics.median_high(LENGTHS))
    parts = spans(records)
    best_s = max(max(parts.values()), sum(parts.values()) / 8)
    packing = between(records) / best_s
    print(f"unequal: {between(records):.1f} s, best packing {best_s:.1f} s or more: {packing:.3f}, "
          f"limit {PACKING_LIMIT}; command {whole_s:.1f} s")  # fmt: skip
    return share <= EQUAL_LIMIT and packing <= PACKING_LIMIT


def measure_quickstart(rounds: int) -> bool:
    """Print the time of the quickstart on two cores with one and two workers, interleaved."""
    ratios = []
    for _ in range(rounds):
        one_s, _ = sweep(1, config="configs/quickstart.yaml")
        two_s, records = sweep(2, config="configs/quickstart.yaml")
        marked = sum(r.place is not None for r in records)
        ratios.append(two_s / one_s)
        print(f"quickstart: one worker {one_s:.1f} s, two {two_s:.1f} s: {ratios[-1]:.3f}; "
              f"{marked} of {len(records)} records name their worker", flush=True)  # fmt: skip
    print(f"median {statistics.median(ratios):.3f}, limit {QUICKSTART_LIMIT}")
    return statistics.median(ratios) <= QUICKSTART_LIMIT


def main(arguments: Sequence[str]) -> int:
    """Measure, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="Time of a trial.")
    parser.add_argument("--quickstart", type=int, default=0, metavar="ROUNDS")
    asked = parser.parse_args(arguments)
    if asked.quickstart:
        return int(not measure_quickstart(asked.quickstart))
    sys.path.insert(0, str(PLUGINS))
    with TemporaryDirectory() as folder:
        os.environ["FAKE_FOLDER"] = folder
        return int(not measure_fake(asked.seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
