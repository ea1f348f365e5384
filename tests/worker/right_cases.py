"""Look for false alarms of the check: run right implementations drawn at random as trials.

    export PYTHONPATH=$PWD
    python -m tests.worker.right_cases --cases 5000
    python -m tests.worker.right_cases --cases 1000 --device cuda   # on one rank

Draws implementation, options, length, heads, head_dim, batch, dtype, mask, mode, memory to keep,
timed passes and ranks; with `--long` steps of decoding, windows and block-sparse attention of
200,000 to 4 million tokens. Case N is the same in every run; `--first N --cases 1` repeats it.
Prints each case that is not ok and, at the end, how many had which status; the exit code is 1
after a `wrong` or an `error`. Cases that an implementation refuses count as unsupported. Takes
about a second a case on two cores; two processes with other first numbers share the work.
"""

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.model import OptionValue, Trial
from longseq_bench.launchers.local import LocalLauncher
from tests.attention.test_contract import COMPILED, NAMES, OPTIONS
from tests.attention.test_ranks import MANY, options_at
from tests.trials import complete, run_trial

LENGTHS = 1, 2, 15, 63, 64, 65, 127, 128, 300, 511, 512, 513, 1000, 1025
MAX_TOKENS = 1500
HEADS = (1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4), (6, 3), (8, 1), (8, 2), (32, 1)
HEAD_DIMS = 1, 2, 3, 4, 8, 16, 24, 32, 64, 128
LATENTS = "32+16", "16+8/24", "33+7/3", "64+32/96", "128+64/192"
MASKS = (
    "sliding-window:7", "sliding-window:200", "prefix:50", "documents:90", "chunked:65",
    "full-documents:33",
)  # fmt: skip
SOFT_CAPS = 0.5, 5.0, 20.0, 30.0, 50.0, 200.0
WORLDS = (1,) * 5 + (2,) * 3 + (3, 4)


def draw(launcher: LocalLauncher, number: int, device: str = "cpu") -> Trial:
    """Return case `number`."""
    pick = random.Random(number)
    world = pick.choice(WORLDS if device == "cpu" else (1,))
    name = pick.choice(sorted({*(NAMES if world == 1 else MANY)} - COMPILED))
    options = pick.choice(OPTIONS.get(name, [{}]) if world == 1 else options_at(name, world))
    heads, kv_heads = pick.choice(HEADS)
    tokens = pick.choice([*LENGTHS, pick.randint(1, MAX_TOKENS), pick.randint(1, MAX_TOKENS)])
    kind, rest = IMPLEMENTATIONS.get(name), random.Random(-1 - number)
    mode = {"causal": pick.random() < 0.5, "mode": pick.choice(("forward", "train"))}
    if kind.takes_masks and rest.random() < 0.5:
        mode |= {"causal": False, "mask": rest.choice(MASKS)}
    if kind.takes_decode and rest.random() < 0.3:
        new = rest.choice((1, 1, 3, 8))
        mode = {"causal": new > 1, "mode": "decode", "new_tokens": min(new, tokens)}
    mode["sink"] = kind.takes_sinks and rest.random() < 0.3
    mode["soft_cap"] = rest.choice(SOFT_CAPS) if rest.random() < 0.2 else None
    shape = {"kv_heads": kv_heads, "head_dim": pick.choice(HEAD_DIMS)}
    if kind.takes_latent and mode["mode"] == "decode" and rest.random() < 0.4:
        shape = {"latent": rest.choice(LATENTS)}
    elif kind.takes_kv_dtype and mode["mode"] == "decode":
        mode["kv_dtype"] = rest.choice((None, "int8", "fp8"))
    return complete(
        launcher, name, max(tokens, world), options, heads=heads, **shape,
        batch=pick.choice((1, 1, 2, world)), world_size=world,
        dtype=pick.choice(("float32", "bfloat16", "float16")), repeats=pick.choice((0, 1, 3)),
        keep=pick.choice(("all", "all", "all", "inputs", "nothing")), seed=pick.randrange(2**20),
        device=device, **mode,
    )  # fmt: skip


def draw_long(launcher: LocalLauncher, number: int, device: str = "cpu") -> Trial:
    """Return a case of 200,000 to 4 million tokens whose work is that of a short one."""
    pick = random.Random(number)
    tokens = round(200_000 * 20 ** pick.random())
    heads, kv_heads = pick.choice(((1, 1), (2, 1)))
    mode: dict[str, Any] = {"mode": "decode", "new_tokens": pick.choice((1, 4))}
    name, options = pick.choice(("ring", "sdpa")), dict[str, OptionValue]()
    dtype = pick.choice(("float32", "bfloat16", "float16"))
    if (kind := pick.randrange(3)) == 1:
        # sdpa has a mask for all pairs; float16 takes minutes on a CPU
        name, mode = "ring", {"mask": f"sliding-window:{pick.choice((64, 500))}"}
        tokens, dtype = 200_000 + tokens // 8, "float32" if number % 2 else "bfloat16"
    elif kind == 2:
        name, mode = "block-sparse", {"causal": pick.random() < 0.5}
        options = {"pattern": "local-window", "sparsity": 1 - 512 / tokens, "block": 128}
    return complete(
        launcher, name, tokens, options, heads=heads, kv_heads=kv_heads,
        head_dim=pick.choice((16, 32, 64)), dtype=dtype, repeats=1, threads=2,
        seed=pick.randrange(2**20), device=device, **mode,
    )  # fmt: skip


def main() -> int:
    """Run the cases; the exit code is 1 if one is wrong or an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    found: Counter[str] = Counter()
    start = time.monotonic()
    with LocalLauncher() as launcher:
        for number in range(args.first, args.first + args.cases):
            case = (draw_long if args.long else draw)(launcher, number, args.device)
            outcome = run_trial(launcher, case)
            status = outcome.status
            if "UserError" in (outcome.reason or ""):
                status = "unsupported"  # options and heads that don't go together
            found[status] += 1
            if status not in ("ok", "unsupported"):
                shape = case.workload.model_dump(exclude_defaults=True)
                print(f"case {number}: {case.implementation} {case.options} {shape} "
                      f"world {case.world_size}, {outcome.status}: {outcome.reason}")  # fmt: skip
            if (number + 1 - args.first) % 100 == 0:
                elapsed = time.monotonic() - start
                print(f"[{number + 1 - args.first}/{args.cases}] {dict(found)}, {elapsed:.0f} s",
                      flush=True)  # fmt: skip
    print(f"cases {args.first} to {args.first + args.cases - 1}: {dict(found)}")
    return int(found["wrong"] + found["error"] > 0)


if __name__ == "__main__":
    sys.exit(main())
