"""Launches of one pass on a GPU, counted without one.

    python -m benchmarks.launches

A launch costs a CPU 5 to 100 µs, however little it computes. So a pass of many short ones measures
the CPU, not the GPU. count_launches.py counts them. The goal of a pass is what it has reached; what
was asked for is beside it. The exit code is 1 if a goal is missed, or if data is copied from or to
the host.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.count_launches import Counted, count_pass
from longseq_bench.core.model import Mode, Workload

PAIRS = {"segments": (8192, 32768), "dilation": (1, 4)}
THREE_PAIRS = {"segments": (2048, 8192, 32768), "dilation": (1, 4, 16)}
SPARSE = {"sparsity": 0.99}
SINK_WINDOW = {"pattern": "sink-window", "sparsity": 0.9}


@dataclass(frozen=True)
class Case:
    """A pass of an implementation.

    goals: the most launches by kind of pass.  asked: the most that a pass in training, or a step of
    decoding, should start; 0: nothing was asked.  new_tokens: of a step of decoding.
    """

    name: str
    goals: dict[Mode, int]
    tokens: int = 2**17
    head_dim: int = 64
    causal: bool = False
    ranks: int = 1
    new_tokens: int = 0
    asked: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def workload(self, mode: Mode) -> Workload:
        """Return the workload, in bfloat16 with 8 heads; to decode 32, with 8 of k."""
        return Workload(
            seq_len=self.tokens, heads=32 if mode == "decode" else 8, kv_heads=8,
            head_dim=self.head_dim, dtype="bfloat16", causal=self.causal, mode=mode,
            new_tokens=self.new_tokens,
        )  # fmt: skip

    def count(self, mode: Mode) -> Counted:
        """Count what a pass starts."""
        return count_pass(self.name, self.workload(mode), self.ranks, **self.options)


def both(forward: int, train: int) -> dict[Mode, int]:
    """Return the goals of a whole sequence."""
    return {"forward": forward, "train": train}


DECODE: dict[Mode, int] = {"decode": 4}

CASES = [
    Case("block-sparse", both(1, 3), asked=3, options=SPARSE),
    Case("block-sparse-adaptive", both(5, 10), asked=12, options=SPARSE),
    Case("block-sparse-adaptive", both(5, 10), causal=True, asked=12, options=SPARSE),
    Case("dilated", both(6, 20), asked=24, options=PAIRS),
    Case("dilated", both(6, 20), causal=True, asked=24, options=PAIRS),
    Case("hilbert", both(9, 24), asked=24, options=PAIRS),
    Case("hilbert", both(9, 24), causal=True, asked=24, options=PAIRS),
    Case("dilated", both(12, 83), 2**18, 128, options=THREE_PAIRS),
    Case("hilbert", both(33, 88), 2**18, 128, options=THREE_PAIRS),
    Case("ring", both(1, 48), 2**20, 128, asked=300),
    Case("ring", both(1, 48), 2**20, 128, causal=True, asked=300),
    Case("ring", both(481, 2073), 2**20, 128, ranks=8),
    Case("ring", both(261, 1289), 2**20, 128, causal=True, ranks=8),
    Case("ring", DECODE, 2**18, 128, causal=True, new_tokens=1, asked=4),
    Case("ring", DECODE, 2**18, 128, causal=True, new_tokens=8, asked=4),
    Case("block-sparse", DECODE, 2**18, 128, True, new_tokens=1, asked=4, options=SINK_WINDOW),
    Case("block-sparse", DECODE, 2**18, 128, True, new_tokens=8, asked=4, options=SINK_WINDOW),
]


def main() -> None:
    print("launches of the first rank\n")
    print(f"{'':22}{'tokens':>10}{'dim':>5}  mask   ranks  ", end="")
    print(f"{'pass':8}{'launches':>9}{'goal':>6}{'asked':>7}{'copies':>8}")
    missed = False
    for case in CASES:
        mask = "causal" if case.causal else "full"
        shape = f"{case.name:22}{case.tokens:>10,}{case.head_dim:>5}  {mask:7}{case.ranks:>5}"
        for mode, goal in case.goals.items():
            found = case.count(mode)
            launches = found.launches.total()
            missed |= launches > goal or found.copies > 0
            name = f"{case.new_tokens} new" if case.new_tokens else mode
            asked = case.asked or ""
            print(f"{shape}  {name:8}{launches:>9}{goal:>6}{asked:>7}{found.copies:>8}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
