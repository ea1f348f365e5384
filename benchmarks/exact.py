"""Kernels of exact attention against torch's scaled_dot_product_attention, interleaved.

    python benchmarks/exact.py                         # 16k tokens, float32, forward
    python benchmarks/exact.py --dtype bfloat16 --train --causal

Prints the median wall and CPU time of each kernel that can run here, their ratio to sdpa, and the
share of the measured rate of matrix products. The exit code is 1 if the compiled CPU kernel takes
more than 0.95 of the time of sdpa in float32, forward.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longseq_bench.attention.one_rank import OneCall
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import Workload
from longseq_bench.core.units import format_rate, format_seconds, parse_tokens
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.base import AttentionKernel, attend
from longseq_bench.kernels.exact.base import KERNELS, Use, select
from longseq_bench.worker.timing import measure_matmul_rate

MAX_RATIO = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16k")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    w = Workload(
        seq_len=parse_tokens(args.tokens), heads=args.heads, kv_heads=args.kv_heads,
        head_dim=args.head_dim, dtype=args.dtype, causal=args.causal,
        mode="train" if args.train else "forward",
    )  # fmt: skip
    passes = build_passes(w, args.device)
    times = measure(passes, args.device, args.rounds)
    rate = measure_matmul_rate(Group.alone(), args.device, w.dtype)
    causal = "causal" if w.causal else "not causal"
    print(f"{w.seq_len:,} tokens, {w.heads} heads ({w.kv_heads} for k, v) of {w.head_dim}, "
          f"{w.dtype}, {causal}, {w.mode}, {torch.get_num_threads()} threads; "
          f"matrix product {format_rate(rate, 'FLOP/s')}")  # fmt: skip
    print(f"{'kernel':18} {'wall':>10} {'CPU':>10} {'× sdpa':>7} {'share of peak':>14}")
    base = median(wall for wall, _ in times["sdpa"])
    for name, samples in times.items():
        wall, cpu = (median(values) for values in zip(*samples, strict=True))
        share = attention_flops(w) / wall / rate
        print(f"{name:18} {format_seconds(wall):>10} {format_seconds(cpu):>10} {wall / base:7.3f} "
              f"{share:14.1%}")  # fmt: skip
    own = times.get("native")
    if own and w.dtype == "float32" and w.mode == "forward":
        ratio = median(wall for wall, _ in own) / base
        print(f"the compiled kernel takes {ratio:.3f} of the time of sdpa (at most {MAX_RATIO})")
        sys.exit(ratio > MAX_RATIO)


def build_passes(w: Workload, device: str) -> dict[str, Callable[[], object]]:
    """Return a function per kernel that runs a pass; on the same inputs."""
    dtype = getattr(torch, w.dtype)
    sizes = [(w.batch, h, w.seq_len, w.head_dim) for h in (w.heads, w.kv_heads, w.kv_heads)]
    q, k, v = (torch.randn(s, device=device).to(dtype).requires_grad_(w.train) for s in sizes)
    grad_out = torch.randn_like(q)

    def run(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], object]:
        def one() -> object:
            out = attention(q, k, v)
            return torch.autograd.grad(out, (q, k, v), grad_out) if w.train else out

        return one

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = w.heads != w.kv_heads
        return scaled_dot_product_attention(q, k, v, is_causal=w.causal, enable_gqa=grouped)

    passes = {"sdpa": run(sdpa)}
    use = Use(device, dtype, w.head_dim, w.train)
    for name in KERNELS.names():
        if reason := KERNELS.get(name).unavailable_reason(use):
            if KERNELS.get(name).device == device:
                print(f"{name}: {reason}")
            continue
        passes[name] = run(differentiable(OneCall(select(name, use)[0], w.causal), w.train))
    return passes


def differentiable(kernel: AttentionKernel, train: bool) -> Callable[..., Tensor]:
    """Return a function of q, k and v that the kernel computes."""
    return lambda q, k, v: attend(q, k, v, kernel, train)


def measure(
    passes: dict[str, Callable[[], object]], device: str, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each pass, in turn; the first round is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for round_ in range(rounds + 1):
        for name, run in passes.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


if __name__ == "__main__":
    main()
