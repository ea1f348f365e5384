"""Steps of decoding against the bandwidth of copies and against torch's attention, interleaved.

    python benchmarks/decode.py                     # 256k cached tokens, 8 KV heads of 128
    python benchmarks/decode.py --tokens 64k --dtype bfloat16 --heads 32 --new-tokens 4
    python benchmarks/decode.py --latent 512+64 --heads 1
    python benchmarks/decode.py --dtype bfloat16 --kv-dtype int8

Prints the median time of a step, tokens per second, and the bytes of the cache per second over the
bandwidth of a copy (bytes read and written), which is measured in turn with the steps. The share is
the median of the rounds' ratios, so that a slow moment of the machine counts for both sides. The
exit code is 1 if the share of `ring` is below 0.8, of a quantised cache (which torch can't read)
below 0.7, for one new token and as many heads as KV heads.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.model import Workload
from longseq_bench.core.units import format_bytes, format_rate, format_seconds, parse_tokens
from longseq_bench.testing.definition import build_attention
from longseq_bench.worker.passes import draw_inputs
from longseq_bench.worker.timing import COPIED_BYTES

MIN_SHARE, MIN_QUANTISED_SHARE = 0.8, 0.7
COPY = "copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="256k")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--latent", help="cache latents, such as 512+64, which are read once")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--kv-dtype", choices=["int8", "fp8"])
    parser.add_argument("--new-tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    shares = []
    for dtype in args.dtype:
        shape = {"kv_heads": args.kv_heads, "head_dim": args.head_dim}
        w = Workload(
            seq_len=parse_tokens(args.tokens), heads=args.heads, dtype=dtype, causal=True,
            mode="decode", new_tokens=args.new_tokens, kv_dtype=args.kv_dtype,
            **{"latent": args.latent} if args.latent else shape,
        )  # fmt: skip
        shares.append(compare(w, args.rounds))
    if w.heads == w.kv_heads and w.new_tokens == 1:
        least = MIN_QUANTISED_SHARE if w.kv_dtype else MIN_SHARE
        print(f"ring has {min(shares):.1%} of the copy's bandwidth (at least {least:.0%})")
        sys.exit(min(shares) < least)


def compare(w: Workload, rounds: int) -> float:
    """Print a table of one workload, and return the share of bandwidth of `ring`."""
    times, cache = measure(w, rounds), floor_bytes(w)
    rates = [2 * COPIED_BYTES["cpu"] / seconds for seconds in times.pop(COPY)]
    print(
        f"{w.seq_len:,} cached tokens, {w.new_tokens} new, {w.heads} heads ({w.kv_heads} for k, v) "
        f"of {w.head_dim}, {w.dtype}, a {w.kv_dtype or w.dtype} cache of {format_bytes(cache)}, "
        f"{torch.get_num_threads()} threads; copy {format_rate(median(rates), 'B/s')}"
    )
    print(f"{'':6} {'time':>10} {'tokens/s':>10} {'cache':>10} {'share of bandwidth':>20}")
    share = {}
    for name, samples in times.items():
        step = median(samples)
        share[name] = median(cache / s / rate for s, rate in zip(samples, rates, strict=True))
        print(f"{name:6} {format_seconds(step):>10} {w.new_tokens / step:10.1f} "
              f"{format_rate(cache / step, 'B/s'):>10} {share[name]:20.1%}")  # fmt: skip
    return share["ring"]


def measure(w: Workload, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps and of a copy, in turn; the first round is not counted."""
    ring = build_attention("ring", {}, w)
    q, k, v = draw_inputs(ring, "cpu", 0, torch.zeros(0)).inputs
    source = torch.ones(COPIED_BYTES["cpu"] // 4)
    copy = torch.zeros_like(source)
    runs: dict[str, Callable[[], object]] = {
        "ring": lambda: ring(q, k, v),
        COPY: lambda: copy.copy_(source),
    }
    if not w.kv_dtype:
        sdpa = build_attention("sdpa", {}, w)
        runs["sdpa"] = lambda: sdpa(q, k, v)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
