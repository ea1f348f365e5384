"""Error rates of `compare` on this machine, as a person uses it: `python benchmarks/compare.py`.

1. busy: the same function twice, one run beside busy processes, nothing else to compare with. Any
   PASS or FAIL is wrong.
2. control: a function that takes 8 % longer, beside an unchanged sdpa; during one of the two runs
   another process takes a share of each core, so that the machine is up to twice as slow. FAIL is
   right. In a quarter as many pairs the function is the same, and there FAIL is wrong.
3. run: `compare --run` of a function that takes 3 % longer; of the same one in a quarter as many.

Options: --pairs 20 --rounds 12 --parts busy,control,run. About an hour on two cores.

With --simulate: records made by chance on a machine whose speed changes, in seconds.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from longseq_bench.comparison.compare import compare
from longseq_bench.comparison.verdict import Comparison, decide
from longseq_bench.core.model import Environment, Measurement, Outcome, Record, Trial, Workload

FUNCTION = """
from torch.nn.functional import scaled_dot_product_attention as sdpa


def attend(q, k, v):
    rows = round({share} * q.shape[2])
    if rows:
        sdpa(q[:, :, :rows], k, v)
    return sdpa(q, k, v)
"""
ROWS = {0.0: 0.0, 0.03: 0.022, 0.08: 0.067}
"""The share of query rows that takes so much of the time: rows are slower in a small batch."""
TRIAL = ("--tokens", "2k", "--threads", "1", "--device", "cpu", "--time-cap", "0.3s")
"""One thread is disturbed least; docs/regression-checks.md says so to users."""
SPIN = """
import os, sys, time
cpu, share = int(sys.argv[1]), float(sys.argv[2])
if share < 1:
    os.sched_setaffinity(0, [cpu])
while True:
    end = time.perf_counter() + 0.01 * share
    while time.perf_counter() < end:
        pass
    if share < 1:
        time.sleep(0.01 * (1 - share))
"""
"""Keeps a core busy: any one, or for a share of each 10 ms a given one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--parts", default="busy,control,run")
    parser.add_argument("--simulate", action="store_true", help="made-up records")
    args = parser.parse_args()
    if args.simulate:
        return simulate(args.pairs)
    parts = {"busy": busy, "control": control, "run": run}
    wrong = [parts[name](args) for name in args.parts.split(",")]
    return int(any(wrong))


def busy(args: argparse.Namespace) -> bool:
    """Print the first words for the same code, one side busy; return True if any is wrong."""
    print(f"1. the same code, busy processes in one run, no control; {args.rounds} rounds")
    words = []
    for i in range(args.pairs):
        rng = Random(i)
        found, speed = apart(rng, args.rounds, 0.0, [], [1.0] * rng.choice((1, 2)))
        words.append(found["verdict"])
        print(f"   {i + 1:3} {found['verdict']:9} machine {speed:.2f}x as slow", flush=True)
    print(f"{tally(words)}\n", flush=True)
    return set(words) != {"TOO NOISY"}


def control(args: argparse.Namespace) -> bool:
    """Print the first words with a control; return True if too few are right."""
    print(f"2. sdpa as control, busy processes in one run; {args.rounds} rounds")
    words = Words(0.08)
    for i, share in enumerate(words.shares(args.pairs)):
        rng = Random(i)
        taken = [rng.uniform(0, 0.99)] * (os.cpu_count() or 1)
        found, speed = apart(rng, args.rounds, share, ["--impl", "sdpa"], taken)
        words.add(share, found, f"; machine {speed:.2f}x as slow")
    return words.sum_up()


def run(args: argparse.Namespace) -> bool:
    """Print the first words of `compare --run`; return True if too few are right."""
    print("3. compare --run, 20 rounds")
    words = Words(0.03)
    with tempfile.TemporaryDirectory() as folder:
        for share in words.shares(args.pairs):
            files = []
            for name, more in (("old", 0.0), ("new", share)):
                file = Path(folder, f"{name}.py")
                # files that are equal are refused
                file.write_text(f"# {name}\n" + FUNCTION.format(share=ROWS[more]))
                files.append(f"{file}:attend")
            words.add(share, json.loads(longseq("compare", "--run", *files, *TRIAL, "--json")))
    return words.sum_up()


class Words:
    """First words of comparisons, apart for pairs with `more` work and pairs without."""

    def __init__(self, more: float) -> None:
        self._more = more
        self._of: dict[float, list[str]] = {more: [], 0.0: []}

    def shares(self, pairs: int) -> Iterator[float]:
        """Yield the additional work of each pair; every fifth has none."""
        for i in range(pairs + pairs // 4):
            yield 0.0 if i % 5 == 4 else self._more

    def add(self, share: float, found: dict[str, Any], text: str = "") -> None:
        """Keep an answer and print it with the ratio of the function that may have changed."""
        self._of[share].append(found["verdict"])
        row = next(row for row in found["times"] if row["implementation"] != "sdpa")
        ratio = f"ratio {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        print(f"   {share:.0%} {found['verdict']:9} {ratio}{text}", flush=True)

    def sum_up(self) -> bool:
        """Print how often each word was said; return True if more than a tenth are wrong."""
        more, same = self._of[self._more], self._of[0.0]
        print(
            f"{self._more:.0%} more work: {tally(more)}; no more work: {tally(same)}\n", flush=True
        )
        return more.count("FAIL") < 0.9 * len(more) or same.count("FAIL") > 0.1 * len(same)


def apart(
    rng: Random, rounds: int, share: float, others: list[str], taken: list[float]
) -> tuple[dict[str, Any], float]:
    """Sweep before and after an edit, one of them disturbed; return the answer of `compare`.

    taken: the share of its core that each process takes that disturbs.
    The second value is the ratio of the slower side's times to the other's: sdpa's if it is there.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, disturbed = Path(folder, "att.py"), rng.randrange(2)
        sides = [str(Path(folder, name)) for name in ("before", "after")]
        for i, side in enumerate(sides):
            file.write_text(FUNCTION.format(share=ROWS[share if i else 0.0]))
            with spinning(taken if i == disturbed else []):
                longseq(
                    "sweep", "--impl", f"{file}:attend", *others, *TRIAL,
                    "--rounds", str(rounds), "--out", side,
                )  # fmt: skip
        found = json.loads(longseq("compare", *sides, "--json"))
    row = found["times"][-1]
    ratio = row["b_s"] / row["a_s"]
    return found, ratio if disturbed else 1 / ratio


@contextmanager
def spinning(taken: list[float]) -> Iterator[None]:
    """Keep processes busy, as other users of the machine would."""
    commands = [[sys.executable, "-c", SPIN, str(cpu), str(t)] for cpu, t in enumerate(taken)]
    started = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def longseq(*arguments: str) -> str:
    """Run a command and return its standard output. A verdict is no error."""
    command = [sys.executable, "-m", "longseq_bench", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tally(words: list[str]) -> str:
    """Return how often each word was said."""
    return ", ".join(f"{word} {words.count(word)} of {len(words)}" for word in sorted(set(words)))


# ---- records made by chance ----------------------------------------------------------------------

OWN_NOISE, DRIFT = 0.015, 0.03
"""Standard deviations of a process's median pass and of the machine's speed from round to round.
In results/epyc2/peers/sweep a row's ratio to sdpa in the same round varies by 1 to 1.7 % x √2."""
OUTLIERS = 0.05, 0.4
"""Share of processes that are disturbed, and by how much at most: 1 of 24 in these records."""
ROUNDS, RUN_ROUNDS = 12, 20


def simulate(pairs: int) -> int:
    """Print what comparisons of made-up records find; return 1 if they find less than stated."""
    words = [decide(busy_pair(Random(i), i % 2), 0.05).word for i in range(pairs)]
    print(f"same code, one side busy, no control: {', '.join(sorted(set(words)))}")
    found = [decide(changed_pair(Random(i), 1.08), 0.05).word for i in range(pairs)]
    same = [decide(changed_pair(Random(i), 1.0), 0.05).word for i in range(pairs)]
    print(f"8 % more work, speed changed, by the control: FAIL in {found.count('FAIL')} of {pairs}")
    print(f"no more work, speed changed, by the control: FAIL in {same.count('FAIL')} of {pairs}")
    run = [decide(run_in_turn(Random(i), 1.03), None).word for i in range(pairs)]
    idle = [decide(run_in_turn(Random(i), 1.0), None).word for i in range(pairs)]
    print(f"3 % more work, measured in turn: FAIL in {run.count('FAIL')} of {pairs}")
    print(f"no more work, measured in turn: FAIL in {idle.count('FAIL')} of {pairs}")
    is_found = min(found.count("FAIL"), run.count("FAIL")) >= 0.9 * pairs
    is_silent = (
        set(words) == {"TOO NOISY"} and same.count("FAIL") + idle.count("FAIL") <= 0.1 * pairs
    )
    return 0 if is_found and is_silent else 1


def busy_pair(rng: Random, side: int) -> Comparison:
    """Compare sdpa with itself while another process takes a part of one side's CPU."""
    slower = rng.uniform(1.1, 2)
    sides = [speeds(rng, ROUNDS, slower if i == side else 1.0) for i in (0, 1)]
    shares = [2 / slower if i == side else 2.0 for i in (0, 1)]
    made = zip(sides, shares, strict=True)
    a, b = (rows(rng, "sdpa", by, cpu_share=share) for by, share in made)
    return compare(a, b)


def changed_pair(rng: Random, work: float) -> Comparison:
    """Compare more work of an edited function on a machine of another speed; sdpa is unchanged."""
    sides = [speeds(rng, ROUNDS, by) for by in (1.0, math.exp(rng.uniform(-1, 1) * math.log(2)))]
    a, b = (
        rows(rng, "sdpa", by) + rows(rng, "att.py:att", by, more, source=source)
        for by, more, source in zip(sides, (1.0, work), ("0" * 16, "1" * 16), strict=True)
    )
    return compare(a, b)


def run_in_turn(rng: Random, work: float) -> Comparison:
    """Compare two implementations that took turns on a machine whose speed drifts."""
    by = speeds(rng, RUN_ROUNDS, 1.0)
    a, b = (rows(rng, "att.py:new", by, more, source="1" * 16) for more in (1.0, work))
    return compare(a, b, is_paired=True)


def speeds(rng: Random, rounds: int, first: float) -> list[float]:
    """Return the time of the same work in each round: a random walk."""
    walk = [first]
    while len(walk) < rounds:
        walk.append(walk[-1] * math.exp(rng.gauss(0, DRIFT)))
    return walk


def rows(
    rng: Random, name: str, by: list[float], work: float = 1.0, cpu_share: float = 2.0,
    source: str | None = None,
) -> list[Record]:  # fmt: skip
    """Return a record per round of a trial of 10 ms."""
    machine = Environment(
        host="alpha", os="Linux", cpu="CPU", cores=2, memory_bytes=2**33, python="3", torch="2",
        longseq="1",
    )  # fmt: skip
    records = []
    for i, speed in enumerate(by):
        time_s = 0.01 * work * speed * math.exp(rng.gauss(0, OWN_NOISE))
        time_s *= 1 + rng.uniform(0.1, OUTLIERS[1]) if rng.random() < OUTLIERS[0] else 1
        passes = tuple(time_s * rng.gauss(1, 0.005) for _ in range(5))
        measured = [("time", passes), ("cpu_time", tuple(cpu_share * t for t in passes))]
        outcome = Outcome(
            status="ok",
            measurements=tuple(Measurement(name=n, unit="s", samples=s) for n, s in measured),
        )
        trial = Trial(implementation=name, workload=Workload(seq_len=2048), round=i, source=source)
        records.append(
            Record(
                trial=trial, outcome=outcome, environment=machine, wall_s=1.0,
                started_at=f"2026-11-21T09:{i:02}:00+00:00",
            )
        )  # fmt: skip
    return records


if __name__ == "__main__":
    start = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - start:.0f} s")
    sys.exit(code)
