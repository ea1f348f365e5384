"""Sparse attention against dense and FlexAttention: `python benchmarks/sparse.py`.

Each pattern in turn with dense `sdpa` and with compiled FlexAttention on the same layout, float32,
8 heads of 64, block 128, in interleaved rounds on the same inputs. Prints the share of ideal,
(dense time x density) / sparse time, as the median over rounds with its range, by wall and by CPU
time, and FlexAttention's time over ours.

Dense attention is timed on 1,024 query rows against all keys and scaled to all rows: every row
takes the same time when all keys are visible. --whole runs all rows (minutes a pass). Also prints
how time grows with length at a fixed number of blocks a row. Options: --cases 32k:0.95,128k:0.99
--patterns ... --kernels native,torch --rounds 5 --train --causal --no-flex --dtype float32

A kernel that can't run has a row with the reason. --device cuda --dtype bfloat16 runs it on a GPU,
where dense attention takes all rows; it has not run on one yet.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from longseq_bench.attention.sparse.block_sparse import build_layout_kernel
from longseq_bench.core.cost import visible_pairs
from longseq_bench.core.errors import LongseqError, UnsupportedError
from longseq_bench.core.units import parse_tokens
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.exact.base import AUTO, Use, select
from longseq_bench.patterns.blocks import PATTERNS, make_layout

HEADS, HEAD_DIM, BLOCK = 8, 64, 128
ROWS = 1024
MIN_SHARES = {"random": 0.65}
MIN_SHARE = 0.75
MAX_GROWTH = 4.4
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
REQUIRED = ("local-window", "dilated-sparse", "sink-window", "strided", "global-local", "random")

Clocked = tuple[float, float]
"""Wall and CPU seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="32k:0.95,128k:0.99")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    for flag in ("--train", "--causal", "--whole", "--no-flex", "--no-growth"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    keep_memory()
    good = True
    for case in args.cases.split(","):
        tokens, sparsity = case.split(":")
        good &= one_case(args, parse_tokens(tokens), float(sparsity))
    if not args.no_growth:
        good &= growth(args)
    sys.exit(0 if good else 1)


def one_case(args: Any, n: int, sparsity: float) -> bool:
    """Print all patterns at one length; return True if every share reaches its goal."""
    inputs = make_inputs(n, args)
    mode = "forward and backward" if args.train else "forward"
    print(
        f"\n{n:,} tokens, {sparsity:.1%} sparse, {'causal' if args.causal else 'both ways'}, ",
        end="",
    )
    print(f"{args.dtype}, {mode}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    layout = "{:<16} {:<8} {:>8} {:>8} {:>8} {:>7} {:>15} {:>9} {:>7}"
    head = (
        "pattern",
        "kernel",
        "density",
        "plan s",
        "time s",
        "share",
        "range",
        "share CPU",
        "flex/us",
    )
    print(layout.format(*head))
    good = True
    names = []
    for name in args.kernels.split(","):
        if reason := choose(args, name)[1]:
            print(f"{'every pattern':<16} can't run: {reason}")
        else:
            names.append(name)
    for pattern in args.patterns.split(","):
        for name in names:
            cells, share = one_pattern(args, pattern, name, sparsity, inputs)
            print(layout.format(*cells), flush=True)
            # flex is here for comparison
            if pattern in REQUIRED and name != "flex":
                good &= share >= MIN_SHARES.get(pattern, MIN_SHARE)
    return good


def one_pattern(
    args: Any, pattern: str, name: str, sparsity: float, inputs: tuple[Tensor, ...]
) -> tuple[list[str], float]:
    """Measure one pattern; return its row of the table and its share of ideal."""
    n = inputs[0].shape[2]
    start = time.perf_counter()
    layout = make_layout(pattern, n, BLOCK, sparsity, args.causal)
    kernel, _ = choose(args, name)
    built = build_layout_kernel(kernel, (layout,), HEADS)
    planned = time.perf_counter() - start
    runs: dict[str, Callable[[], Clocked]] = {"ours": passes(built, inputs, args.train)}
    if not (args.no_flex or args.train):
        runs["flex"] = flex(args, layout, inputs)
    times: dict[str, list[Clocked]] = {k: [] for k in (*runs, "dense")}
    for round_ in range(args.rounds + 1):
        for key, run in (*runs.items(), ("dense", lambda: dense(args, inputs))):
            clocked = run()
            if round_:  # the first warms up
                times[key].append(clocked)
    density = layout.visible_pairs / visible_pairs(n, args.causal)
    shares = [
        [d[i] * density / o[i] for d, o in zip(times["dense"], times["ours"], strict=True)]
        for i in (0, 1)
    ]
    against = [f[0] / o[0] for f, o in zip(times.get("flex", []), times["ours"], strict=False)]
    share = median(shares[0])
    took = median(wall for wall, _ in times["ours"])
    return [
        pattern, kernel, f"{density:.4f}", f"{planned:.3f}", f"{took:.3f}",
        f"{share:.2f}", f"{min(shares[0]):.2f} to {max(shares[0]):.2f}", f"{median(shares[1]):.2f}",
        f"{median(against):.2f}" if against else "",
    ], share  # fmt: skip


def choose(args: Any, name: str) -> tuple[str, str]:
    """Return the name of the kernel to use, and "" or the reason why it can't run."""
    task = args.device, args.dtype, HEAD_DIM, BLOCK, args.train
    try:
        chosen, _ = sparse_selection.choose(name, *task)
    except UnsupportedError as error:
        return name, str(error)
    return chosen, ""


def passes(
    kernel: AttentionKernel, inputs: tuple[Tensor, ...], train: bool
) -> Callable[[], Clocked]:
    q, k, v, grad = inputs

    def one() -> None:
        out, lse = kernel.forward(q, k, v, train)
        if train:
            assert lse is not None
            kernel.backward((grad, q, out, lse), (k, v))

    return lambda: clocked(one)


def use_of(args: Any) -> Use:
    """Return what a kernel of exact attention has to compute."""
    return Use(args.device, getattr(torch, args.dtype), HEAD_DIM, args.train)


def flex(args: Any, layout: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Clocked]:
    """Compile FlexAttention on the layout; return a function that times one pass."""
    q, k, v, _ = inputs
    try:
        kernel = build_layout_kernel("flex", (layout,), HEADS)
        kernel.forward(q, k, v, False)
    except LongseqError as error:
        sys.exit(f"FlexAttention: {error}")
    return lambda: clocked(lambda: kernel.forward(q, k, v, False))


def dense(args: Any, inputs: tuple[Tensor, ...]) -> Clocked:
    """Time dense attention of all rows, or of some rows scaled to all."""
    q, k, v, grad = inputs
    n = q.shape[2]
    rows = n if args.whole or args.device == "cuda" else min(n, ROWS)
    causal = args.causal and rows == n
    kernel, _ = select("aten-flash-cpu" if args.device == "cpu" else AUTO, use_of(args))

    def one() -> None:
        out, lse = kernel.forward(q[:, :, :rows], k, v, causal)
        if args.train:
            kernel.backward((grad[:, :, :rows], q[:, :, :rows], out, lse), (k, v), causal)

    scale = visible_pairs(n, args.causal) / (visible_pairs(n, causal) * rows / n)
    wall, cpu = clocked(one)
    return wall * scale, cpu * scale


def growth(args: Any) -> bool:
    """Print the ratio of times at 512k and 128k tokens, with 10 blocks a row in both."""
    print("\ntime from 128k to 512k tokens at the same blocks a row")
    times: dict[int, list[float]] = {}
    runs = {}
    for n, sparsity in ((131072, 0.99), (524288, 0.9975)):
        inputs = make_inputs(n, args)
        layout = make_layout("local-window", n, BLOCK, sparsity, args.causal)
        kernel, _ = choose(args, "auto")
        runs[n] = passes(build_layout_kernel(kernel, (layout,), HEADS), inputs, args.train)
        times[n] = []
    for round_ in range(args.rounds + 1):
        for n, run in runs.items():
            wall = run()[0]
            if round_:
                times[n].append(wall)
    short, long = times.values()
    ratio = median(b / a for a, b in zip(short, long, strict=True))
    print(f"local-window: {median(short):.3f} s, {median(long):.3f} s: {ratio:.2f} times")
    return ratio <= MAX_GROWTH


def keep_memory() -> None:
    """Reuse the memory of earlier passes: on a virtual machine page faults cost seconds a GiB."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def make_inputs(n: int, args: Any) -> tuple[Tensor, ...]:
    """Return random q, k, v and an output gradient."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, n, HEAD_DIM)
    return tuple(
        torch.randn(shape, generator=generator).to(args.device, getattr(torch, args.dtype))
        for _ in range(4)
    )


def clocked(run: Callable[[], object]) -> Clocked:
    start, cpu = time.perf_counter(), time.process_time()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu


if __name__ == "__main__":
    main()
