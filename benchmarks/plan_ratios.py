"""Predicted and measured ratios of times to that of ring: `python -m benchmarks.plan_ratios`.

The prediction is that of `longseq plan` from formulas: the visible pairs that the busiest rank
computes, and the bytes sent, at the rate of one core (measured here, one rank) and the assumed link
between ranks of a CPU. The measurement is the median over interleaved rounds, of wall time and of
CPU time (sum over ranks). Wall time is judged; with more ranks than cores it depends on which rank
the system lets wait, and CPU time is judged instead. A predicted ratio is good within 25 %. So is
the order of two implementations that differ by more than 20 % when measured. The exit code is 1 if
a ratio or an order that is judged is not good.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from statistics import median

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.hardware import Hardware, this_cpu
from longseq_bench.core.model import Mode, Record, Trial, Workload
from longseq_bench.environment import collect
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.search.prediction import predict
from longseq_bench.search.rates import RateModel

NAMES = ("ring", "ulysses", "usp", "collective", "head-parallel")
RATIO_LIMIT, ORDER_LIMIT = 0.25, 0.20

Seconds = dict[str, float]


def make_trials(
    launcher: Launcher, tokens: int, mode: Mode, causal: bool, ranks: int
) -> dict[str, Trial]:
    """Return a trial of each implementation, with one thread a rank."""
    shape = Workload(seq_len=tokens, heads=8, head_dim=64, mode=mode, causal=causal)
    catalogue = launcher.catalogue()
    return {
        name: Trial(
            implementation=name, options=catalogue.options(name, {}), workload=shape,
            world_size=ranks, threads=1, repeats=3, memory_budget=4 * 2**30,
        )
        for name in NAMES
    }  # fmt: skip


def predict_seconds(launcher: Launcher, trials: Mapping[str, Trial], hardware: Hardware) -> Seconds:
    """Return the predicted seconds of a pass."""
    seconds, rates = {}, RateModel(hardware)
    for name, trial in trials.items():
        result = predict(trial, launcher.dry_run, rates)
        assert not isinstance(result, str), result
        seconds[name] = result.times.total
    return seconds


def measure_seconds(
    launcher: Launcher, trials: Mapping[str, Trial], rounds: int
) -> tuple[Seconds, Seconds]:
    """Return the median wall time of a pass, and its CPU time summed over ranks."""
    here = collect()
    wall: defaultdict[str, list[float]] = defaultdict(list)
    cpu: defaultdict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        for name, trial in trials.items():
            outcome = launcher.run(trial.replace(round=turn), lambda phase, part: None).outcome
            assert outcome.status == "ok", f"{name}: {outcome.status}, {outcome.reason}"
            record = Record(
                trial=trial, outcome=outcome, environment=here, started_at="", wall_s=0.0
            )
            wall[name] += per_iteration(record, "time")
            of_ranks = [m.samples for m in outcome.measurements if m.name == "cpu_time"]
            cpu[name] += [sum(samples) for samples in zip(*of_ranks, strict=True)]
    return {n: median(x) for n, x in wall.items()}, {n: median(x) for n, x in cpu.items()}


def measure_rate(launcher: Launcher, tokens: int, mode: Mode) -> float:
    """Return the FLOP/s of `ring` on one rank with one thread."""
    trial = make_trials(launcher, tokens, mode, False, 1)["ring"]
    (seconds,), _ = (times.values() for times in measure_seconds(launcher, {"ring": trial}, 1))
    return attention_flops(trial.workload) / seconds


def compare(predicted: Seconds, measured: Seconds, kind: str) -> bool:
    """Print the ratios to ring, and return True if all of them and all orders are good."""
    good = True
    for name in NAMES[1:]:
        ahead, found = (seconds[name] / seconds["ring"] for seconds in (predicted, measured))
        is_close = abs(ahead / found - 1) <= RATIO_LIMIT
        good &= is_close
        flag = "" if is_close else "  <-- beyond 25 %"
        print(f"  {kind:4} {name:14} {found:8.2f} {ahead:10.2f} {ahead / found - 1:+8.0%}{flag}")
    for a, b in combinations(NAMES, 2):
        found, ahead = measured[a] - measured[b], predicted[a] - predicted[b]
        differ = max(measured[a], measured[b]) > (1 + ORDER_LIMIT) * min(measured[a], measured[b])
        if differ and found * ahead <= 0:
            good = False
            print(f"  {kind:4} {a} and {b}: the order is wrong")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--mode", choices=["forward", "train"], default="train")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    good = True
    print(f"{args.tokens:,} tokens, 8 heads of 64, {args.mode}, float32, one thread a rank")
    here = collect()
    cpu = this_cpu(here.cpu, here.cores, here.memory_bytes)
    with LocalLauncher() as launcher:
        rate = measure_rate(launcher, args.tokens, args.mode)
        print(f"one core: {rate / 1e9:.0f} GFLOP/s; load {here.load}")
        cpu = cpu.model_copy(update={"flops": {"float32": rate * here.cores}})
        for ranks in (2, 4):
            for causal in (False, True):
                trials = make_trials(launcher, args.tokens, args.mode, causal, ranks)
                predicted = predict_seconds(launcher, trials, cpu)
                wall, cpu_time = measure_seconds(launcher, trials, args.rounds)
                mask = "causal" if causal else "not causal"
                print(
                    f"\n{ranks} ranks, {mask}: ring takes {wall['ring']:.2f} s, "
                    f"{cpu_time['ring']:.2f} s of CPU; ratio to ring measured, predicted, off",
                    flush=True,
                )
                wall_is_good = compare(predicted, wall, "wall")
                cpu_is_good = compare(predicted, cpu_time, "CPU")
                good &= wall_is_good if ranks <= here.cores else cpu_is_good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
