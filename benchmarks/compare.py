"""Error rates of `compare` on this machine: `python benchmarks/compare.py`.

1. False alarms: pairs of runs of the same code. In how many is any trial called slower or faster?
   The level allows 5 % of comparisons.
2. Detection: pairs whose second run computes about a tenth more query rows. In how many are the
   slowed trials called slower, and how many of the others are called slower or faster?

A plug-in in a temporary folder is the implementation that can be slowed; it reads the share of
extra rows from a file, so that name, options and environment are equal on both sides. The rounds
of A and B alternate, so that drift of the machine affects both; with `--apart` all of A runs before
all of B. Options: --pairs 20 --rounds 5 --level 5% --out FOLDER. With --out the records are kept,
and the same command continues where it stopped. Takes about ten minutes on two cores.

With --simulate: records made by chance on a machine whose speed changes, in seconds.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from longseq_bench.comparison.compare import compare
from longseq_bench.comparison.verdict import Comparison, decide
from longseq_bench.core.model import Environment, Measurement, Outcome, Record, Trial, Workload
from longseq_bench.core.units import parse_share
from longseq_bench.environment import collect
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.runner import run_schedule
from longseq_bench.search.strategy import sweep
from longseq_bench.store import Store

SLOWER, PLAIN = "slowed-sdpa", "ring"
LENGTHS = (1024, 2048)
SHARE = "share"
"""A file in the folder of the plug-in; it holds the share of rows to compute twice."""
REPEATS, CAP_S = 15, 0.15

PLUGIN = f'''
from pathlib import Path

from torch.nn.functional import scaled_dot_product_attention

from longseq_bench.attention.base import Attention
from longseq_bench.core.errors import UnsupportedError


class Slowed(Attention):
    summary = "sdpa that computes some of its query rows twice"

    def __init__(self, workload, group):
        super().__init__(workload, group)
        if group.size > 1:
            raise UnsupportedError("runs on one rank")
        share = float(Path(__file__).with_name("{SHARE}").read_text())
        self.again = round(share * workload.seq_len)

    def __call__(self, q, k, v):
        out = scaled_dot_product_attention(q, k, v)
        if self.again:
            scaled_dot_product_attention(q[:, :, :self.again], k, v)
        return out
'''
ENTRY = f"[longseq_bench.implementations]\n{SLOWER} = slowed_sdpa:Slowed\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level", default="5%")
    parser.add_argument("--slowed", default="10%")
    parser.add_argument("--apart", action="store_true", help="A as a whole, then B as a whole")
    parser.add_argument("--out", type=Path, help="folder that keeps the records of every pair")
    parser.add_argument("--simulate", action="store_true", help="made-up records of 12 rounds")
    args = parser.parse_args()
    if args.simulate:
        return simulate(args.pairs)
    with tempfile.TemporaryDirectory() as folder:
        args.plugin = Path(folder)
        install(args.plugin)
        out = args.out or Path(folder) / "records"
        false = same_code(args, out)
        missed = slowed_code(args, out)
    return 1 if false > allowed(args) or missed else 0


def install(folder: Path) -> None:
    """Install the plug-in for this process and its children, as a distribution on the path."""
    (folder / "slowed_sdpa.py").write_text(PLUGIN)
    (folder / SHARE).write_text("0")
    facts = folder / "slowed_sdpa-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slowed-sdpa\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(ENTRY)
    sys.path.insert(0, str(folder))
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), known]))


def allowed(args: argparse.Namespace) -> int:
    """Return the number of false alarms that the level permits, rounded up."""
    return math.ceil(parse_share(args.level, "--level") * int(args.pairs))


def same_code(args: argparse.Namespace, out: Path) -> int:
    """Print and return the number of pairs of equal code with an alarm."""
    print(f"1. the same code twice, {args.pairs} pairs, {args.rounds} rounds", flush=True)
    alarms = 0
    for i in range(args.pairs):
        found = pair(args, out / f"same-{i:02d}", 0.0)
        alarmed = verdicts(found)
        alarms += bool(alarmed)
        print(f"   {i + 1:3} {'; '.join(alarmed) or 'the same'} ({detectable(found)})", flush=True)
    print(
        f"any alarm in {alarms} of {args.pairs} pairs; at {args.level} a comparison at most "
        f"{allowed(args)} may have one\n",
        flush=True,
    )
    return alarms


def slowed_code(args: argparse.Namespace, out: Path) -> int:
    """Print the pairs in which all slowed trials were found; return the number of pairs missed."""
    share = parse_share(args.slowed, "--slowed")
    print(f"2. B computes {args.slowed} more rows of {SLOWER}, {args.pairs} pairs", flush=True)
    whole = some = rows = false = 0
    for i in range(args.pairs):
        found = pair(args, out / f"slowed-{i:02d}", share)
        slowed = [t for t in found.times if t.a.implementation == SLOWER]
        hits = [t for t in slowed if t.verdict == "slower"]
        others = [t for t in found.times if t not in slowed and t.verdict != "same"]
        whole, some = whole + (len(hits) == len(slowed)), some + bool(hits)
        rows, false = rows + len(hits), false + bool(others)
        ratios = ", ".join(f"{t.ratio:.3f}" for t in slowed)
        print(f"   {i + 1:3} slower in {len(hits)} of {len(slowed)} (ratios {ratios})", flush=True)
    print(
        f"slower in {some} of {args.pairs} pairs, of all slowed trials in {whole}, of "
        f"{rows} of {args.pairs * len(LENGTHS)} such trials; {false} pairs with an alarm among "
        "the others",
        flush=True,
    )
    return int(args.pairs) - some


def pair(args: argparse.Namespace, folder: Path, slowed: float) -> Comparison:
    """Compare the two runs of a pair: rounds in turn, or with --apart one run after the other."""
    turns = [(visit, side) for visit in range(args.rounds) for side in (0, 1)]
    if args.apart:
        turns.sort(key=lambda turn: turn[1])
    with LocalLauncher() as launcher, Store(folder / "a") as first, Store(folder / "b") as second:
        compared = trials(launcher)
        for visit, side in turns:
            args.plugin.joinpath(SHARE).write_text(str((0.0, slowed)[side]))
            # trials in the store are not run again, so this is one more round
            run_schedule(sweep(compared, visit + 1), launcher, (first, second)[side], collect)
        records = [list(store.records) for store in (first, second)]
    return compare(records[0], records[1], level=parse_share(args.level, "--level"))


def trials(launcher: Launcher) -> list[Trial]:
    """Return two implementations at two lengths, on one thread each to be disturbed least."""
    catalogue = launcher.catalogue()
    return [
        Trial(
            implementation=name, options=catalogue.options(name, {}), repeats=REPEATS,
            workload=Workload(seq_len=n), memory_budget=2**30, time_cap=CAP_S, threads=1,
        )
        for n in LENGTHS
        for name in (SLOWER, PLAIN)
    ]  # fmt: skip


def verdicts(found: Comparison) -> list[str]:
    """Return a line per trial that was called slower or faster."""
    return [
        f"{t.a.implementation} {t.a.tokens}: {t.verdict} {t.ratio:.3f}"
        for t in found.times
        if t.verdict != "same"
    ]


def detectable(found: Comparison) -> str:
    """Return the smallest change that could be detected: median and worst trial."""
    known = sorted(t.estimate.detectable for t in found.times if t.estimate)
    return (
        f"detectable from {known[len(known) // 2]:.1%}, at worst {known[-1]:.1%}"
        if known
        else "none"
    )


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
