"""A ring over two ranks against one process with two threads: `python benchmarks/overlap.py`.

`ring order=zigzag` on two ranks of one thread, and `sdpa` in one process of two threads, on the
same causal workload in interleaved rounds. Prints medians over rounds, CPU and wall time, their
ratio, and the share of the ring's time that is exposed communication.
Takes some minutes. Options: --tokens 16k --rounds 5 --mode forward --orders zigzag,striped.
"""

import argparse
import sys
from statistics import median

from longseq_bench.core.model import Trial, Workload
from longseq_bench.core.units import parse_tokens
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.local import LocalLauncher

MAX_RATIO, MAX_EXPOSED = 1.15, 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--orders", default="zigzag")
    parser.add_argument("--mode", default="forward", choices=["forward", "train"])
    args = parser.parse_args()
    workload = Workload.model_validate(
        {"seq_len": parse_tokens(args.tokens), "causal": True, "mode": args.mode}
    )
    with LocalLauncher() as launcher:
        trials = {"sdpa, 2 threads": trial(launcher, workload, "sdpa", 1, 2)}
        for order in args.orders.split(","):
            trials[f"ring order={order}, 2 ranks"] = trial(
                launcher, workload, "ring", 2, 1, order=order
            )
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trials}
        for _ in range(args.rounds):
            for name, one in trials.items():
                rounds[name].append(measure(launcher, one))
    sys.exit(0 if print_table(workload, rounds) else 1)


def trial(
    launcher: Launcher, workload: Workload, name: str, world: int, threads: int, **options: str
) -> Trial:
    """Return the trial of one round: a few passes after a warm-up."""
    filled = launcher.catalogue().options(name, options)
    return Trial(
        implementation=name, options=filled, workload=workload, world_size=world,
        threads=threads, repeats=3, time_cap=60.0,
    )  # fmt: skip


def measure(launcher: Launcher, one: Trial) -> dict[str, float]:
    """Run a trial; return medians in seconds, each pass as slow as its slowest rank."""
    outcome = launcher.run(one, lambda phase, part: None).outcome
    if outcome.status != "ok":
        sys.exit(f"{one.implementation}: {outcome.status}: {outcome.reason}")
    samples: dict[str, list[tuple[float, ...]]] = {}
    for m in outcome.measurements:
        samples.setdefault(m.name, []).append(m.samples)
    names = [n for n in ("time", "cpu_time", "compute_time", "communication_time") if n in samples]
    return {name: median(map(max, zip(*samples[name], strict=True))) for name in names}


def print_table(workload: Workload, results: dict[str, list[dict[str, float]]]) -> bool:
    """Print the table; return True if the zigzag ring reaches its goals."""
    print(f"{workload.seq_len:,} tokens, causal, {workload.mode}, float32, 8 heads of 64")
    layout = "{:<30} {:>8} {:>8} {:>8} {:>9} {:>9} {:>9}"
    print(layout.format("", "time s", "CPU s", "× sdpa", "compute s", "comm. s", "exposed"))
    base: list[float] = []
    good = True
    for name, rounds in results.items():
        middle = {key: median(r[key] for r in rounds) for key in rounds[0]}
        base = base or [r["time"] for r in rounds]
        ratio = median(r["time"] / b for r, b in zip(rounds, base, strict=True))
        cells = [f"{middle['time']:.3f}", f"{middle['cpu_time']:.3f}", f"{ratio:.3f}"]
        if "compute_time" in middle:
            exposed = median(max(0.0, 1 - r["compute_time"] / r["time"]) for r in rounds)
            comm = middle["communication_time"]
            cells += [f"{middle['compute_time']:.3f}", f"{comm:.3f}", f"{exposed:.1%}"]
            if "zigzag" in name:
                good = ratio <= MAX_RATIO and exposed <= MAX_EXPOSED
        print(layout.format(name, *cells, *[""] * (6 - len(cells))))
    print(f"goals of zigzag: × sdpa at most {MAX_RATIO}, exposed at most {MAX_EXPOSED:.0%}")
    return good


if __name__ == "__main__":
    main()
