"""Masks over ranks: `python -m benchmarks.masks`.

Each pass of ring under a mask is run interleaved with a causal one of the same tokens, ranks and
kernel. The ideal time of a mask is the causal time times the ratio of visible pairs: a mask at 1.00
wastes nothing. `Imbalance`: visible pairs of the busiest rank over the mean. The exit code is 1 if
a mask of documents needs more than 1.25 of its ideal, or has an imbalance above 1.05.
"""

import argparse
import sys
from collections import defaultdict
from statistics import median

from longseq_bench.analysis.runs import largest_over_mean, per_iteration
from longseq_bench.core.model import Record, Trial, Workload
from longseq_bench.environment import collect
from longseq_bench.launchers.local import LocalLauncher

CAUSAL = "causal"
MASKS = ("documents:chatqa2@1", "documents:4k", "full-documents:chatqa2@1", "sliding-window:4k",
         "prefix:8k")  # fmt: skip
IDEAL_LIMIT, IMBALANCE_LIMIT = 1.25, 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16 * 1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", choices=("forward", "train"), default="forward")
    parser.add_argument("--kernel", default="auto")
    arguments = parser.parse_args()
    here, launcher = collect(), LocalLauncher()
    options = launcher.catalogue().options("ring", {"kernel": arguments.kernel})
    times: defaultdict[str, list[float]] = defaultdict(list)
    imbalances: dict[str, float] = {}
    workloads = {
        mask: Workload(
            seq_len=arguments.tokens, heads=8, head_dim=64, mode=arguments.mode, mask=mask
        )
        for mask in (CAUSAL, *MASKS)
    }
    for turn in range(arguments.rounds):
        for mask, workload in workloads.items():
            trial = Trial(
                implementation="ring", options=options, workload=workload, threads=1, repeats=2,
                world_size=arguments.ranks, round=turn, memory_budget=8 * 2**30,
            )  # fmt: skip
            outcome = launcher.run(trial, lambda phase, part: None).outcome
            assert outcome.status == "ok", f"{mask}: {outcome.status}, {outcome.reason}"
            record = Record(
                trial=trial, outcome=outcome, environment=here, started_at="", wall_s=0.0
            )
            times[mask] += per_iteration(record, "time")
            imbalances[mask] = largest_over_mean(outcome.samples("work_share")) or 1.0
    causal, pairs = median(times[CAUSAL]), workloads[CAUSAL].visibility.visible_pairs
    words = f"{arguments.tokens:,} tokens, 8 heads of 64, {arguments.mode}, {arguments.ranks} ranks"
    print(f"ring, kernel {arguments.kernel}, {words}, one thread each; load {here.load}")
    print(f"{'mask':28}{'pairs':>8}{'time':>10}{'of ideal':>10}{'imbalance':>11}")
    good = True
    for mask, workload in workloads.items():
        share = workload.visibility.visible_pairs(arguments.tokens) / pairs(arguments.tokens)
        seconds = median(times[mask])
        ratio = seconds / (causal * share)
        print(f"{mask:28}{share:8.3f}{seconds:9.3f}s{ratio:10.2f}{imbalances[mask]:11.3f}")
        if workload.visibility.has_documents:
            good &= ratio <= IDEAL_LIMIT and imbalances[mask] <= IMBALANCE_LIMIT
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
