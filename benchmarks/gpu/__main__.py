"""The GPU acceptance command: the first thing to run on a machine with a GPU.

    python -m benchmarks.gpu brief --out gpu-results --minutes 12     # until nothing is left
    python -m benchmarks.gpu brief --out gpu-results --wheels wheels  # without internet
    python -m benchmarks.gpu kernels --out gpu-results                # one step
    python -m benchmarks.gpu brief --out dry-run --dry-run            # toy sizes on a CPU

`brief` runs what is not yet done of all steps, the most valuable first, and ends after --minutes.
The same command continues, on any GPU of the same kind. The result of each item is a JSON file
under --out/STEP. The exit code is 1 if an item failed, 2 for bad input.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.wheels import MissingWheels, use_wheels

STEPS = ("smoke", "correct", "kernels", "speed", "decode", "longest", "faults", "ranks")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("step", choices=["brief", *STEPS], help="all steps by value, or one step")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument(
        "--minutes", type=float, default=12.0,
        help="start no item that would end later, and cut long ones; default: 12",
    )  # fmt: skip
    parser.add_argument("--retry", action="store_true", help="run failed items again")
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes on the CPU, to test this command itself"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR",
        help="install what is missing from the wheels in this folder, to a folder under --out",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    try:
        if args.wheels:
            use_wheels(args.wheels, args.out)
    except MissingWheels as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    # it needs packages that the wheels may have brought
    from benchmarks.gpu.command import run

    steps = STEPS if args.step == "brief" else (args.step,)
    return run(steps, args.out, args.minutes, args.retry, args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
