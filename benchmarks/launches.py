"""Launches of one pass on a GPU, counted without one.

    python -m benchmarks.launches

A launch costs a CPU 5 to 100 µs, however little it computes. So a pass of many short ones measures
the CPU, not the GPU. count_launches.py counts them. The exit code is 1 if a goal is missed, or if
data is copied from or to the host.
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

    goals: the most launches by kind of pass.  new_tokens: of a step of decoding.
    """

    name: str
    goals: dict[Mode, int]
    tokens: int = 2**17
    head_dim: int = 64
    causal: bool = False
    ranks: int = 1
    new_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def count(self, mode: Mode) -> Counted:
        """Count what a pass starts, in bfloat16 with 8 heads; to decode 32, with 8 of k."""
        w = Workload(
            seq_len=self.tokens, heads=32 if mode == "decode" else 8, kv_heads=8,
            head_dim=self.head_dim, dtype="bfloat16", causal=self.causal, mode=mode,
            new_tokens=self.new_tokens,
        )  # fmt: skip
        return count_pass(self.name, w, self.ranks, **self.options)


def both(forward: int, train: int) -> dict[Mode, int]:
    """Return the goals of a whole sequence."""
    return {"forward": forward, "train": train}


CASES = [
    Case("block-sparse", both(1, 3), options=SPARSE),
    Case("block-sparse-adaptive", both(12, 12), options=SPARSE),
    Case("block-sparse-adaptive", both(12, 12), causal=True, options=SPARSE),
    Case("dilated", both(24, 60), options=PAIRS),
    Case("dilated", both(24, 60), causal=True, options=PAIRS),
    Case("hilbert", both(24, 90), options=PAIRS),
    Case("hilbert", both(24, 120), causal=True, options=PAIRS),
    Case("dilated", both(64, 256), 2**18, 128, options=THREE_PAIRS),
    Case("hilbert", both(80, 384), 2**18, 128, options=THREE_PAIRS),
    Case("ring", both(300, 5600), 2**20, 128),
    Case("ring", both(300, 3200), 2**20, 128, causal=True),
    Case("ring", both(500, 3000), 2**20, 128, ranks=8),
    Case("ring", both(300, 1800), 2**20, 128, causal=True, ranks=8),
    Case("ring", {"decode": 4}, 2**18, 128, causal=True, new_tokens=1),
    Case("ring", {"decode": 4}, 2**18, 128, causal=True, new_tokens=8),
    Case("block-sparse", {"decode": 4}, 2**18, 128, True, new_tokens=1, options=SINK_WINDOW),
    Case("block-sparse", {"decode": 4}, 2**18, 128, True, new_tokens=8, options=SINK_WINDOW),
]


def main() -> None:
    print("launches of the first rank\n")
    print(f"{'':22}{'tokens':>10}{'dim':>5}  mask   ranks  ", end="")
    print(f"{'pass':8}{'launches':>9}{'goal':>6}{'copies':>8}")
    missed = False
    for case in CASES:
        mask = "causal" if case.causal else "full"
        shape = f"{case.name:22}{case.tokens:>10,}{case.head_dim:>5}  {mask:7}{case.ranks:>5}"
        for mode, goal in case.goals.items():
            found = case.count(mode)
            launches = found.launches.total()
            missed |= launches > goal or found.copies > 0
            name = f"{case.new_tokens} new" if case.new_tokens else mode
            print(f"{shape}  {name:8}{launches:>9}{goal:>6}{found.copies:>8}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
