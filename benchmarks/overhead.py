"""Overhead of measuring, and agreement with torch's timer: `python benchmarks/overhead.py`.

1. Isolation: a trial through the launcher against the same trial in this process, interleaved.
2. Agreement: `sdpa` timed by longseq against torch.utils.benchmark, interleaved.
3. The pass under the budget (exact heap) against the timed passes (fast heap) of the same trials.
4. `longseq --help`: wall time, and whether it imports torch or pandas.
Every figure is printed as a ratio or a difference of medians. Options: --rounds 9.
"""

import argparse
import multiprocessing
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from longseq_bench.core.model import Outcome, Trial, Workload
from longseq_bench.launchers.base import Launcher
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.trial import run_trial

MAX_ISOLATION_S = 0.15
MAX_DISAGREEMENT = 0.05
MAX_HELP_S = 0.3


class Silent(MessageSender):
    """A sender that drops every message."""

    def __init__(self) -> None:
        self.phase = "start"

    def _send(self, message: dict[str, object]) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with LocalLauncher() as launcher:
        launcher.catalogue()
        good = [
            isolation(launcher, rounds),
            agreement(launcher, rounds),
            heaps(launcher),
            help_time(),
        ]
    sys.exit(0 if all(good) else 1)


def make_trial(name: str, tokens: int, repeats: int, mode: str = "forward") -> Trial:
    workload = Workload.model_validate({"seq_len": tokens, "mode": mode})
    options = {"sdpa": {"backend": "auto"}, "ring": {"chunk": 4096}}[name]
    return Trial(
        implementation=name, options=options, workload=workload, repeats=repeats, time_cap=1.0
    )


def run(launcher: Launcher, trial: Trial) -> Outcome:
    outcome = launcher.run(trial, lambda phase, part: None).outcome
    assert outcome.status == "ok", outcome.reason
    return outcome


def isolation(launcher: Launcher, rounds: int) -> bool:
    """Compare the wall time of an isolated trial with its own work; medians over rounds."""
    print("1. isolation: wall seconds of a trial")
    good = True
    for mode in ("forward", "train"):
        trial = make_trial("sdpa", 1024, 0, mode)
        isolated, own = [], []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            run(launcher, trial)
            isolated.append(time.perf_counter() - start)
            start = time.perf_counter()
            assert run_trial(trial, Silent()).status == "ok"
            own.append(time.perf_counter() - start)
        apart, inside = median(isolated[1:]), median(own[1:])
        cost = apart - inside
        good &= cost <= MAX_ISOLATION_S
        print(f"   {mode:<8} isolated {apart:.3f}  own work {inside:.3f}  cost {cost:.3f} "
              f"(at most {MAX_ISOLATION_S})")  # fmt: skip
    return good


def timer_median(tokens: int, answer: Connection) -> None:
    """Time the call with torch.utils.benchmark, in a process of the same fork server."""
    names: dict[str, object] = {"attend": scaled_dot_product_attention}
    names |= {name: torch.randn(1, 8, tokens, 64) for name in "qkv"}
    threads = torch.get_num_threads()
    timer = Timer("attend(q, k, v)", globals=names, num_threads=threads)
    answer.send(timer.blocked_autorange(min_run_time=1.0).median)


def by_timer(launcher: Launcher, tokens: int) -> float:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=timer_median, args=(tokens, sender))
    process.start()
    took = float(receiver.recv())
    process.join()
    return took


def by_tool(launcher: Launcher, tokens: int) -> float:
    """Time the call with longseq, with the thread count set as torch.utils.benchmark sets it.

    Setting it makes sdpa 5 to 8 % slower here: MKL then no longer chooses by itself.
    """
    trial = make_trial("sdpa", tokens, 30).replace(threads=torch.get_num_threads())
    return median(run(launcher, trial).samples("time"))


def keep_busy(seconds: float = 1.0) -> None:
    """Load the processor, so that neither side profits from the higher clock after an idle time."""
    end, square = time.perf_counter() + seconds, torch.ones(1024, 1024)
    while time.perf_counter() < end:
        square @ square


def agreement(launcher: Launcher, rounds: int) -> bool:
    """Print the ratio of longseq's median time to that of torch.utils.benchmark, per round."""
    print("2. sdpa by the tool over torch.utils.benchmark: ratio of medians, a round each")
    good = True
    for tokens in (1024, 4096):
        ratios = []
        for turn in range(rounds):
            took = {}
            for side in (by_tool, by_timer) if turn % 2 else (by_timer, by_tool):
                keep_busy()
                took[side] = side(launcher, tokens)
            ratios.append(took[by_tool] / took[by_timer])
        middle = median(ratios)
        good &= abs(middle - 1) <= MAX_DISAGREEMENT
        print(f"   {tokens:>5} tokens: median {middle:.3f}, from {min(ratios):.3f} to "
              f"{max(ratios):.3f} (within {MAX_DISAGREEMENT:.0%})")  # fmt: skip
    return good


def heaps(launcher: Launcher) -> bool:
    """Print how much slower the pass under exact accounting is; it decides on time budgets."""
    print("3. pass under the budget over timed passes: ratio of medians")
    for name, tokens in (("sdpa", 8192), ("ring", 8192), ("ring", 16384)):
        outcomes = [run(launcher, make_trial(name, tokens, 3)) for _ in range(3)]
        exact = median(s for o in outcomes for s in o.samples("pass_time"))
        fast = median(s for o in outcomes for s in o.samples("time"))
        print(
            f"   {name:<5} {tokens:>6} tokens: {exact:.3f} s over {fast:.3f} s = {exact / fast:.3f}"
        )
    return True


def help_time() -> bool:
    """Print the wall time of `longseq --help` and the heavy modules it imports."""
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
    print(f"4. longseq --help: {median(times):.3f} s (under {MAX_HELP_S}), imports of {heavy}")
    return median(times) < MAX_HELP_S and heavy == "[]"


if __name__ == "__main__":
    main()
