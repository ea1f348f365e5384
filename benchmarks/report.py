"""Time, memory and file sizes of a report of many records: `python benchmarks/report.py`.

Makes 20,000 records of sweeps and searches and runs `longseq report` on them, reading included.
The limits are 12 s, 800 MiB and 8 MB a file. Three shapes: mixed (rounds, searches, failures and
two ranks on many workloads), distinct (no two records of one trial, so that each is a row) and
workloads (20 records on each, so that each of 1,000 is a table). The exit code is 1 if a limit is
exceeded.
Options: --records 100000 --shape all --format html --kind summary --seed 0 --keep FOLDER;
--stages prints the cost of loading, building rows and building documents instead.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path
from typing import Any

from longseq_bench.core.model import Environment, Measurement, Outcome, Record, Trial
from longseq_bench.store import write_line

MAX_S, MAX_BYTES, MAX_RSS = 12.0, 8 * 10**6, 800 * 2**20
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sdpa", {"backend": "auto"}),
    ("sdpa", {"backend": "math"}),
    ("dense", {}),
    ("ring", {"chunk": 4096, "order": "zigzag", "wire_dtype": None}),
    ("ring", {"chunk": 1024, "order": "zigzag", "wire_dtype": None}),
    ("collective", {"chunk": 4096}),
    ("hilbert", {"segments": (512, 1024), "dilation": (1, 2), "mix": "softmax"}),
    ("dilated", {"segments": (2048, 4096), "dilation": (1, 4)}),
    *(
        ("block-sparse", {"pattern": pattern, "sparsity": sparsity, "block": 128, "seed": 0})
        for pattern, sparsity in product(("local-window", "hilbert"), (0.5, 0.9, 0.99))
    ),
)
SPREADS = ("ring", "collective", "hilbert", "dilated")
MODES = ("forward", "train")
DTYPES = ("float32", "bfloat16")
CAUSAL = (False, True)
LENGTHS = tuple(2**n for n in range(10, 20))
SHAPES = tuple(product((1, 2, 4, 8), (4, 8, 16, 32), (32, 64, 96, 128)))
FAILURES = (
    ("oom", "backward", "tried to allocate {0:,} bytes beyond the budget of 1 GiB"),
    ("timeout", "time", "one pass took longer than the 20 s allowed"),
    ("wrong", "check", "the largest error is 0.{0}, more than 0.01"),
    ("unsupported", "plan", "head_dim {0} is no power of two"),
    ("crashed", "forward", "its process died of signal 9 (killed)"),
)
FAILED, PROBES = 0.15, 7
SEARCHED = 0.6
"""Share of the swept variants that are also searched for their maximum."""
HOST: dict[str, Any] = {
    "os": "Linux 6.1", "cpu": "Some CPU", "cores": 2, "memory_bytes": 2**34, "python": "3.11.7",
    "torch": "2.13.0+cpu", "longseq": "0.1.0", "commit": "efa39d5838ee", "clock_mhz": 2600.0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--shape", choices=(*MADE, "all"), default="all")
    parser.add_argument("--format", default="html")
    parser.add_argument("--kind", default="summary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the records, which are kept there")
    parser.add_argument("--stages", action="store_true")
    args = parser.parse_args()
    missed = False
    for shape in MADE if args.shape == "all" else (args.shape,):
        with tempfile.TemporaryDirectory() as passing:
            folder = (args.keep or Path(passing)) / shape
            size = write(folder, shape, args.records, args.seed)
            print(f"{shape}: {args.records:,} records, {size / 1e6:.0f} MB", flush=True)
            if args.stages:
                run([sys.executable, "-c", STAGES, str(folder), args.kind])
            else:
                missed |= report(folder, args.format, args.kind)
    sys.exit(1 if missed else 0)


def report(folder: Path, formats: str, kind: str) -> bool:
    """Run `longseq report` and print its cost; return True if a limit was exceeded."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "longseq_bench", "report", str(folder), "--out", out]
        wall, cpu, rss = run([*command, "--format", formats, "--kind", kind])
        files = sorted(p for p in Path(out).rglob("*") if p.is_file())
        print(f"  wall  {wall:8.1f} s    under {MAX_S:.0f} s; {cpu:.1f} s of CPU")
        print(f"  peak  {rss / 2**20:8.0f} MiB  under {MAX_RSS / 2**20:.0f} MiB")
        for file in files:
            size = file.stat().st_size
            print(f"  size  {size / 1e6:8.1f} MB   under {MAX_BYTES / 1e6:.0f} MB; {file.name}")
        largest = max(file.stat().st_size for file in files)
    return wall >= MAX_S or rss >= MAX_RSS or largest >= MAX_BYTES


STAGES = """
import resource, sys, time
from longseq_bench.reports.kinds import documents
from longseq_bench.store import load
from longseq_bench.analysis.searches import search_rows
from longseq_bench.analysis.sweeps import sweep_rows

def timed(label, work):
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  {label:<16} {wall:6.2f} s, {cpu:6.2f} s of CPU, peak {mib:5.0f} MiB", flush=True)
    return found

records = timed("load", lambda: load(sys.argv[1]).records)
for tabulate in (sweep_rows, search_rows):
    timed(tabulate.__name__, lambda: len(tabulate(records)))
built = timed("documents", lambda: documents(records, sys.argv[2].split(",")))
for document in built:
    points = sum(len(s.points) for s in document.sections)
    tables = [t for s in document.sections for t in s.tables]
    rows = sum(len(t.rows) for t in tables)
    print(f"  {document.kind}: {points:,} sentences, {len(tables):,} tables, {rows:,} rows")
"""


def run(command: list[str]) -> tuple[float, float, int]:
    """Run a command; return wall seconds, CPU seconds and peak bytes, its children included."""
    start = time.perf_counter()
    child = subprocess.Popen(command)
    # Not RUSAGE_CHILDREN: its peak is that of the largest child so far.
    _, status, used = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{' '.join(command[:5])} … ended with {child.returncode}")
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def write(folder: Path, shape: str, records: int, seed: int) -> int:
    """Write records.jsonl, equal for equal seeds; return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    with open(folder / "records.jsonl", "wb") as stream:
        for record in islice(MADE[shape](rng), records):
            stream.write(write_line(record))
        return stream.tell()


def mixed(rng: random.Random) -> Iterator[Record]:
    """Yield sweeps of 2 or 3 rounds and searches in turn, over many workloads."""
    for shape, mode, dtype, causal in product(SHAPES, MODES, DTYPES, CAUSAL):
        where = Environment(host="bench", load=(round(rng.random(), 2), 0.5, 0.5), **HOST)
        workload = _workload(shape, mode, dtype, causal)
        for name, options in VARIANTS:
            for world in (1, 2) if name in SPREADS else (1,):
                for tokens in LENGTHS:
                    yield from _rounds(rng, _trial(name, options, tokens, workload, world), where)
                if rng.random() < SEARCHED:
                    yield from _search(rng, name, options, workload, world, where)


def distinct(rng: random.Random) -> Iterator[Record]:
    """Yield records of different trials: few workloads, many options."""
    where = Environment(host="bench", load=(0.5, 0.5, 0.5), **HOST)
    for chunk in range(16, 16 * 10_000, 16):
        for mode, dtype, causal in product(MODES, DTYPES, CAUSAL):
            workload = _workload((1, 8, 64), mode, dtype, causal)
            for name, tokens in product(("ring", "collective", "tiled", "sdpa"), LENGTHS):
                trial = _trial(name, {"chunk": chunk}, tokens, workload, 1)
                yield _record(trial, where, _outcome(rng, trial, 10, rng.random() < FAILED))


def workloads(rng: random.Random) -> Iterator[Record]:
    """Yield 20 records per workload: two implementations at ten lengths, another batch each."""
    where = Environment(host="bench", load=(0.5, 0.5, 0.5), **HOST)
    for batch in count(1):
        workload = _workload((batch, 8, 64), "forward", "float32", False)
        for name, tokens in product(("sdpa", "ring"), LENGTHS):
            trial = _trial(name, {}, tokens, workload, 1)
            yield _record(trial, where, _outcome(rng, trial, 6, fails=False))


MADE = {"mixed": mixed, "distinct": distinct, "workloads": workloads}


def _workload(shape: tuple[int, int, int], mode: str, dtype: str, causal: bool) -> dict[str, Any]:
    batch, heads, head_dim = shape
    return {
        "batch": batch, "heads": heads, "head_dim": head_dim, "dtype": dtype, "causal": causal,
        "mode": mode,
    }  # fmt: skip


def _trial(
    name: str, options: dict[str, Any], tokens: int, workload: dict[str, Any], world: int,
    **more: Any,
) -> Trial:  # fmt: skip
    return Trial.model_validate(
        {
            "implementation": name, "options": options, "world_size": world, "repeats": 20,
            "workload": {"seq_len": tokens, **workload}, "memory_budget": 2**30,
            "time_budget": 20.0, "time_cap": 0.5, **more,
        }
    )  # fmt: skip


def _record(trial: Trial, where: Environment, outcome: Outcome, **more: Any) -> Record:
    return Record(
        trial=trial, outcome=outcome, environment=where, started_at="2026-11-21T12:13:38+00:00",
        wall_s=0.25, processes=trial.world_size,
        command="longseq sweep configs/many.yaml --out results/many", **more,
    )  # fmt: skip


def _rounds(rng: random.Random, trial: Trial, where: Environment) -> Iterator[Record]:
    fails = rng.random() < FAILED
    for i in range(rng.choice((2, 3))):
        outcome = _outcome(rng, trial, rng.randint(5, 20), fails)
        yield _record(trial.model_copy(update={"round": i}), where, outcome)


def _search(
    rng: random.Random, name: str, options: dict[str, Any], workload: dict[str, Any], world: int,
    where: Environment,
) -> Iterator[Record]:  # fmt: skip
    """Yield probes near the maximum, some of which fail, then confirmations."""
    longest = rng.randint(2000, 200_000)
    for i in range(PROBES):
        confirms, fails = i > PROBES - 3, i in (1, PROBES - 3)
        tokens = longest + rng.randint(1, 50) if fails else longest if confirms else longest - 10
        trial = _trial(name, options, tokens, workload, world, repeats=0)
        purpose = "confirm" if confirms else "probe"
        outcome = _outcome(rng, trial, 0, fails, FAILURES[0])
        yield _record(trial, where, outcome, purpose=purpose, predicted_tokens=longest)


def _outcome(
    rng: random.Random, trial: Trial, samples: int, fails: bool,
    failure: tuple[str, str, str] | None = None,
) -> Outcome:  # fmt: skip
    if fails:
        status, phase, reason = failure or rng.choice(FAILURES)
        text = reason.format(rng.randrange(10, 10**6))
        return Outcome.model_validate({"status": status, "phase": phase, "reason": text})
    measured = [m for rank in range(trial.world_size) for m in _measured(rng, trial, samples, rank)]
    facts = {"pass_s": rng.random(), "memory_meter": "heap peak (VmHWM)", "kernel": "flash (CPU)",
             "errors": {"out": rng.random() * 1e-6}, "timer": "clock"}  # fmt: skip
    return Outcome(status="ok", measurements=tuple(measured), facts=facts)


def _measured(rng: random.Random, trial: Trial, samples: int, rank: int) -> Iterator[Measurement]:
    tokens = trial.workload.seq_len

    def of(name: str, unit: str, *values: float) -> Measurement:
        return Measurement(name=name, unit=unit, samples=values, rank=rank)

    def noisy(seconds: float) -> list[float]:
        return [seconds * (1 + 0.05 * rng.random()) for _ in range(samples)]

    seconds = tokens * 1e-5 * (0.5 + rng.random())
    yield of("own_tokens", "1", tokens / trial.world_size)
    yield of("plan_time", "s", rng.random() * 1e-4)
    yield of("peak", "B", float(tokens * rng.randint(8000, 20000)))
    yield of("pass_time", "s", seconds * 1.1)
    yield of("flops", "FLOP", 2048.0 * tokens**2)
    yield of("floor", "B", 8192.0 * tokens)
    yield of("bytes_sent", "B", 4096.0 * tokens * (trial.world_size - 1))
    yield of("bytes_formula", "B", 4096.0 * tokens * (trial.world_size - 1))
    if "sparsity" in trial.options:
        yield of("density_asked", "1", 1 - float(str(trial.options["sparsity"])))
        yield of("density_achieved", "1", 0.99 - float(str(trial.options["sparsity"])) * 0.98)
        yield of("dense_time", "s", *noisy(seconds * 3))
    yield of("max_error", "1", rng.random() * 1e-6)
    yield of("zero_rows", "1", 0.0)
    if samples:
        yield of("time", "s", *noisy(seconds))
        yield of("cpu_time", "s", *noisy(seconds * 1.9))
        if trial.world_size > 1:
            yield of("compute_time", "s", *noisy(seconds * 0.8))
            yield of("communication_time", "s", *noisy(seconds * 0.2))


if __name__ == "__main__":
    main()
