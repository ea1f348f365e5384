"""Launches of one pass of `ring`, `dilated` and `hilbert` on a GPU, counted without one.

    python -m benchmarks.launches

A launch costs a CPU 5 to 100 µs, however little it computes. So a pass of many short ones measures
the CPU, not the GPU. count_launches.py counts them. The goal is of a forward pass. The exit code is
1 if a goal is missed, or if data is copied from or to the host.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.count_launches import Counted, count_pass
from longseq_bench.core.model import Mode, Workload

PAIRS = {"segments": (8192, 32768), "dilation": (1, 4)}
THREE_PAIRS = {"segments": (2048, 8192, 32768), "dilation": (1, 4, 16)}


@dataclass(frozen=True)
class Case:
    """A pass of an implementation, and the most launches of it forward."""

    name: str
    goal: int
    tokens: int = 2**17
    head_dim: int = 64
    causal: bool = False
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def workload(self, mode: Mode) -> Workload:
        """Return the workload of a pass, in bfloat16 with 8 heads."""
        return Workload(
            seq_len=self.tokens, heads=8, kv_heads=8, head_dim=self.head_dim, dtype="bfloat16",
            causal=self.causal, mode=mode,
        )  # fmt: skip

    def count(self, mode: Mode) -> Counted:
        """Count what a pass starts."""
        return count_pass(self.name, self.workload(mode), self.ranks, **self.options)


CASES = [
    Case("dilated", 24, options=PAIRS),
    Case("dilated", 24, causal=True, options=PAIRS),
    Case("hilbert", 24, options=PAIRS),
    Case("hilbert", 24, causal=True, options=PAIRS),
    Case("dilated", 64, 2**18, 128, options=THREE_PAIRS),
    Case("hilbert", 80, 2**18, 128, options=THREE_PAIRS),
    Case("ring", 300, 2**20, 128),
    Case("ring", 300, 2**20, 128, causal=True),
    Case("ring", 500, 2**20, 128, ranks=8),
    Case("ring", 300, 2**20, 128, causal=True, ranks=8),
]


def main() -> None:
    print("bfloat16, 8 heads; launches of the first rank\n")
    print(f"{'':10}{'tokens':>10}{'head_dim':>10}{'mask':>8}{'ranks':>7}", end="")
    print(f"{'forward':>9}{'train':>7}{'copies':>8}{'goal':>6}")
    missed = False
    for case in CASES:
        forward, train = (case.count(mode) for mode in ("forward", "train"))
        launches, copies = forward.launches.total(), forward.copies + train.copies
        missed |= launches > case.goal or copies > 0
        mask = "causal" if case.causal else "full"
        print(
            f"{case.name:10}{case.tokens:>10,}{case.head_dim:>10}{mask:>8}{case.ranks:>7}", end=""
        )
        print(f"{launches:>9}{train.launches.total():>7}{copies:>8}{case.goal:>6}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
