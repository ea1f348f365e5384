"""How often `compare` is right on this machine: `python benchmarks/compare.py`.

1. Pairs of runs of the same code: for how many any trial is called slower or faster, beside the
   level (5 % of comparisons at most).
2. Pairs of which the second computes about a tenth more query rows: in how many the trials that do
   are called slower, and how many of the others are called anything.

The implementation that can be slowed is a plug-in made in a temporary folder, which reads there by
how much: name, options and environment are the same on both sides. Both sides of a pair
are one sweep, each round of A followed by the same round of B, so that a drift of the machine meets
both; `--apart` runs all of A and then all of B, as two sweeps by hand would be.
Options: --pairs 20 --rounds 5 --level 5% --out FOLDER. With --out records are kept, and the same
command goes on where it stopped. Takes about ten minutes on two cores.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from longseq_bench.comparison.compare import compare
from longseq_bench.comparison.model import Comparison
from longseq_bench.core.model import Trial, Workload
from longseq_bench.core.units import parse_share
from longseq_bench.environment import collect
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.runner import run_schedule
from longseq_bench.search.strategy import sweep
from longseq_bench.store import Store

SLOWER, PLAIN = "slowed-sdpa", "ring"
LENGTHS = (1024, 2048)
SHARE = "share"
"""A file beside the plug-in."""
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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked.plugin = Path(folder)
        install(asked.plugin)
        out = asked.out or Path(folder) / "records"
        false = same_code(asked, out)
        missed = slowed_code(asked, out)
    return 1 if false > allowed(asked) or missed else 0


def install(folder: Path) -> None:
    """Put the plug-in where a distribution would be, for this process and those it starts."""
    (folder / "slowed_sdpa.py").write_text(PLUGIN)
    (folder / SHARE).write_text("0")
    facts = folder / "slowed_sdpa-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slowed-sdpa\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(ENTRY)
    sys.path.insert(0, str(folder))
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), known]))


def allowed(asked: argparse.Namespace) -> int:
    """Alarms of pairs of the same code: the level's share, rounded up."""
    return math.ceil(parse_share(asked.level, "--level") * asked.pairs)


def same_code(asked: argparse.Namespace, out: Path) -> int:
    """Prints how many pairs raised an alarm, and gives that number."""
    print(f"1. the same code twice, {asked.pairs} pairs, {asked.rounds} rounds", flush=True)
    alarms = 0
    for i in range(asked.pairs):
        found = pair(asked, out / f"same-{i:02d}", 0.0)
        told = verdicts(found)
        alarms += bool(told)
        print(f"   {i + 1:3} {'; '.join(told) or 'the same'} ({seen(found)})", flush=True)
    print(
        f"any alarm in {alarms} of {asked.pairs} pairs; at {asked.level} a comparison at most "
        f"{allowed(asked)} may have one\n",
        flush=True,
    )
    return alarms


def slowed_code(asked: argparse.Namespace, out: Path) -> int:
    """Prints in how many pairs all slowed trials were found, and gives the number missed."""
    share = parse_share(asked.slowed, "--slowed")
    print(f"2. B computes {asked.slowed} more rows of {SLOWER}, {asked.pairs} pairs", flush=True)
    whole = some = rows = false = 0
    for i in range(asked.pairs):
        found = pair(asked, out / f"slowed-{i:02d}", share)
        ours = [t for t in found.times if t.row["implementation"] == SLOWER]
        hits = [t for t in ours if t.verdict == "slower"]
        others = [t for t in found.times if t not in ours and t.verdict != "same"]
        whole, some = whole + (len(hits) == len(ours)), some + bool(hits)
        rows, false = rows + len(hits), false + bool(others)
        ratios = ", ".join(f"{t.ratio:.3f}" for t in ours)
        print(f"   {i + 1:3} slower in {len(hits)} of {len(ours)} (ratios {ratios})", flush=True)
    print(
        f"slower was said in {some} of {asked.pairs} pairs, of all slowed trials in {whole}, of "
        f"{rows} of {asked.pairs * len(LENGTHS)} such trials; {false} pairs with anything said of "
        "the others",
        flush=True,
    )
    return asked.pairs - some


def pair(asked: argparse.Namespace, folder: Path, slowed: float) -> Comparison:
    """Both runs of a pair, in turn by rounds or one after the other, compared."""
    turns = [(visit, side) for visit in range(asked.rounds) for side in (0, 1)]
    if asked.apart:
        turns.sort(key=lambda turn: turn[1])
    with LocalLauncher() as launcher, Store(folder / "a") as first, Store(folder / "b") as second:
        wanted = trials(launcher)
        for visit, side in turns:
            asked.plugin.joinpath(SHARE).write_text(str((0.0, slowed)[side]))
            # what is in the store already is not run again, so this is one more round
            run_schedule(sweep(wanted, visit + 1), launcher, (first, second)[side], collect)
        records = [list(store.records) for store in (first, second)]
    return compare(records[0], records[1], level=parse_share(asked.level, "--level"))


def trials(launcher: LocalLauncher) -> list[Trial]:
    """Two implementations at two lengths, so four rows, by one thread each: what else runs on the
    machine then disturbs them least."""
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
    """What is said of trials that are the same."""
    return [
        f"{t.row['implementation']} {t.row['tokens']}: {t.verdict} {t.ratio:.3f}"
        for t in found.times
        if t.verdict != "same"
    ]


def seen(found: Comparison) -> str:
    """What could have been seen, in the middle row and at worst."""
    known = sorted(t.estimate.detectable for t in found.times if t.estimate)
    return f"seen from {known[len(known) // 2]:.1%}, at worst {known[-1]:.1%}" if known else "none"


if __name__ == "__main__":
    start = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - start:.0f} s")
    sys.exit(code)
