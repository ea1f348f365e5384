"""Kernel calls of one pass on a GPU, counted without one.

    python -m benchmarks.launches

A call costs 0.05 to 0.1 ms of a CPU, however little it computes. So a pass of many short calls
measures the CPU, not the GPU. Nothing is computed: the tiles of a pass are counted. The last column
has the forward calls with the tiles of a CPU. The exit code is 1 if a goal is missed.
"""

import sys
from collections.abc import Iterator

import torch

from longseq_bench.attention.exact.ring import Ring
from longseq_bench.attention.one_rank import single_rank_tiles
from longseq_bench.attention.sparse.dilated import Dilated, Hilbert
from longseq_bench.attention.tiles import (
    SIZES,
    Block,
    ExactBlocks,
    LocalShare,
)
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.exact.base import AUTO, Use, select
from longseq_bench.kernels.tiling import RowBlock, calls
from longseq_bench.patterns.dilated import hilbert_order

HEADS, HEAD_DIM = 8, 128
SEGMENTS, DILATION = (2048, 8192, 32768), (1, 4, 16)

GOALS = {
    ("ring", 2**20, 1): 600,
    ("ring", 2**20, 8): 300,
    ("dilated", 2**18, 1): 128,
    ("hilbert", 2**18, 1): 128,
}
"""Calls of a forward pass of each rank, by implementation, tokens and ranks."""


def main() -> None:
    print(f"{HEADS} heads of {HEAD_DIM}, bfloat16, causal; calls of a kernel of each rank\n")
    print(f"{'':10}{'tokens':>12}{'ranks':>7}{'forward':>10}{'train':>8}{'goal':>7}{'CPU':>10}")
    missed = False
    for (name, tokens, ranks), goal in GOALS.items():
        forward, train = (count(name, tokens, ranks, mode) for mode in ("forward", "train"))
        missed |= forward > goal
        on_cpu = count(name, tokens, ranks, "forward", "cpu")
        print(f"{name:10}{tokens:>12,}{ranks:>7}{forward:>10,}{train:>8,}{goal:>7,}{on_cpu:>10,}")
    sys.exit(missed)


def count(name: str, tokens: int, ranks: int, mode: str, device: str = "cuda") -> int:
    """Return the kernel calls of the rank with the most calls."""
    w = Workload(
        seq_len=tokens, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="bfloat16",
        causal=True, mode=mode,
    )  # fmt: skip
    if name == "ring":
        passes = 2 if w.train else 1
        if ranks == 1:
            return passes * count_calls(single_rank_tiles(w, None, SIZES[device]))
        return passes * max(ring_calls(w, rank, ranks, device) for rank in range(ranks))
    kind = {"dilated": Dilated, "hilbert": Hilbert}[name]
    return (2 if w.train else 1) * count_calls(segment_tiles(kind, w, device))


def count_calls(tiles: Iterator[RowBlock]) -> int:
    return sum(1 for tile in tiles for _ in calls(tile, 1, torch.device("cpu")))


def ring_calls(w: Workload, rank: int, ranks: int, device: str) -> int:
    """Return the calls of one rank for its own keys and every block that visits it."""
    attention = Ring(w, Group(rank, ranks))
    attention.device = device
    ring = attention._exchange()
    steps = ring.steps()
    order, exact = attention.order, select(AUTO, Use("cpu", torch.bfloat16, HEAD_DIM, w.train))[0]
    tiled = ExactBlocks(w, attention.group, exact, order, order.runs(rank), SIZES[device])
    shares = [LocalShare(i, len(steps) + 1) for i in range(len(steps) + 1)]
    blocks: list[Block] = [*shares, *(ring.block_at(step) for step in steps)]
    return sum(1 for block in blocks for _ in tiled.tiles(block))


def segment_tiles(kind: type[Dilated], w: Workload, device: str) -> Iterator[RowBlock]:
    attention = kind(w, Group.alone(), segments=SEGMENTS, dilation=DILATION)
    attention.device = device
    if attention.permuted:
        attention.segments.walk = hilbert_order(w.seq_len)
    return attention._tiles()


if __name__ == "__main__":
    main()
