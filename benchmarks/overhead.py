"""What measuring costs and whether it agrees: `python benchmarks/overhead.py [--rounds 9]`.

1. Isolation: a trial through the launcher beside the same probe in this process, interleaved.
2. Agreement: `sdpa` timed by the tool beside torch.utils.benchmark, interleaved.
3. The pass under the budget (exact heap) beside the timed passes (fast heap) of the same trials.
4. `longseq --help`: wall time, and whether it imports torch or pandas.
Every figure is printed with what it is compared with, as a ratio or a difference of medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from longseq_bench.launchers.forked import Forked
from longseq_bench.model import Outcome, Trial, Workload
from longseq_bench.probe.probe import probe
from longseq_bench.probe.tell import Teller

MOST_ISOLATION_S = 0.15
MOST_DISAGREEMENT = 0.05
MOST_HELP_S = 0.3


class Silent(Teller):
    """Tells nobody."""

    def __init__(self) -> None:
        self.phase = "start"

    def _send(self, message: dict[str, object]) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with Forked() as launcher:
        launcher.catalogue()
        good = [
            isolation(launcher, rounds),
            agreement(launcher, rounds),
            heaps(launcher),
            help_time(),
        ]
    sys.exit(0 if all(good) else 1)


def asked(name: str, tokens: int, repeats: int, mode: str = "forward") -> Trial:
    workload = Workload.model_validate({"seq_len": tokens, "mode": mode})
    options = {"sdpa": {"backend": "auto"}, "ring": {"chunk": 4096}}[name]
    return Trial(
        implementation=name, options=options, workload=workload, repeats=repeats, time_cap=1.0
    )


def run(launcher: Forked, trial: Trial) -> Outcome:
    outcome = launcher.run(trial, lambda phase, part: None).outcome
    assert outcome.status == "ok", outcome.reason
    return outcome


def isolation(launcher: Forked, rounds: int) -> bool:
    """A whole trial's wall time less that of its own work, median over rounds."""
    print("1. isolation: wall seconds of a trial")
    good = True
    for mode in ("forward", "train"):
        trial = asked("sdpa", 1024, 0, mode)
        isolated, own = [], []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            run(launcher, trial)
            isolated.append(time.perf_counter() - start)
            start = time.perf_counter()
            assert probe(trial, Silent()).status == "ok"
            own.append(time.perf_counter() - start)
        apart, inside = median(isolated[1:]), median(own[1:])
        cost = apart - inside
        good &= cost <= MOST_ISOLATION_S
        print(f"   {mode:<8} isolated {apart:.3f}  own work {inside:.3f}  cost {cost:.3f} "
              f"(at most {MOST_ISOLATION_S})")  # fmt: skip
    return good


def agreement(launcher: Forked, rounds: int) -> bool:
    """Median time by the tool over median time by torch.utils.benchmark, round by round."""
    print("2. sdpa by the tool over torch.utils.benchmark: ratio of medians, a round each")
    good = True
    for tokens in (1024, 4096):
        q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
        timer = Timer(
            "attend(q, k, v)",
            globals={"attend": scaled_dot_product_attention, "q": q, "k": k, "v": v},
            num_threads=torch.get_num_threads(),
        )
        ratios = []
        for _ in range(rounds):
            ours = median(run(launcher, asked("sdpa", tokens, 30)).samples("time"))
            ratios.append(ours / timer.blocked_autorange(min_run_time=1.0).median)
        middle = median(ratios)
        good &= abs(middle - 1) <= MOST_DISAGREEMENT
        print(f"   {tokens:>5} tokens: median {middle:.3f}, from {min(ratios):.3f} to "
              f"{max(ratios):.3f} (within {MOST_DISAGREEMENT:.0%})")  # fmt: skip
    return good


def heaps(launcher: Forked) -> bool:
    """How much slower the pass under exact accounting is; a time budget is judged by that pass."""
    print("3. pass under the budget over timed passes: ratio of medians")
    for name, tokens in (("sdpa", 8192), ("ring", 8192), ("ring", 16384)):
        outcomes = [run(launcher, asked(name, tokens, 3)) for _ in range(3)]
        exact = median(s for o in outcomes for s in o.samples("pass_time"))
        fast = median(s for o in outcomes for s in o.samples("time"))
        print(
            f"   {name:<5} {tokens:>6} tokens: {exact:.3f} s over {fast:.3f} s = {exact / fast:.3f}"
        )
    return True


def help_time() -> bool:
    """Wall seconds of `longseq --help`, and the heavy modules it imports."""
    code = (
        "import sys; from longseq_bench.cli import run; run(['--help']);"
        "print([m for m in ('torch', 'pandas') if m in sys.modules], file=sys.stderr)"
    )
    times = []
    for _ in range(9):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        times.append(time.perf_counter() - start)
    heavy = done.stderr.strip()
    print(f"4. longseq --help: {median(times):.3f} s (under {MOST_HELP_S}), imports of {heavy}")
    return median(times) < MOST_HELP_S and heavy == "[]"


if __name__ == "__main__":
    main()
