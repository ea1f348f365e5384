"""The GPU acceptance command: the first thing to run on a machine with a GPU.

    python -m benchmarks.gpu smoke --out gpu-results       # 3 minutes
    python -m benchmarks.gpu all --out gpu-results         # repeat it until nothing is left
    python -m benchmarks.gpu all --dry-run --out dry-run   # toy sizes on a CPU

Steps: smoke, correct, kernels, speed, longest, faults, ranks; `all` runs them in this order. Each
call ends after --minutes and says what is left; the same command continues there. The result of
each item is a JSON file under --out/STEP. The exit code is 1 if an item failed, 2 for bad input.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.items import (
    Result,
    Session,
    Step,
    format_table,
    last_line,
    read_document,
    run_step,
)
from longseq_bench.core.gpus import read_visible_gpus

BAD_INPUT, INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    steps = load_steps()
    parser.add_argument("step", choices=[*steps, "all"], help="step to run, or all of them")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument(
        "--minutes", type=float, default=9.0,
        help="start no item after this time, and cut long ones; default: 9",
    )  # fmt: skip
    parser.add_argument("--retry", action="store_true", help="run failed items again")
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes on the CPU, to test this command itself"
    )
    args = parser.parse_args(arguments)
    session = Session(
        args.out, "cpu" if args.dry_run else "cuda", args.dry_run, args.minutes, args.retry
    )
    if problem := find_problem(args.out, args.minutes, args.dry_run) or find_gpu_problem(session):
        print(f"benchmarks.gpu: {problem}", file=sys.stderr)
        return BAD_INPUT
    for reason in list_users_of_gpus(session):
        print(f"benchmarks.gpu: {reason}; figures will be wrong (docs/gpu.md)", file=sys.stderr)
    chosen = list(steps.values()) if args.step == "all" else [steps[args.step]]
    try:
        results = {step: run_step(step, session) for step in chosen}
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED
    return report(results, session)


def load_steps() -> dict[str, Step]:
    """Return the steps by name, in the order of `all`."""
    from benchmarks.gpu import correct, faults, kernels, longest, ranks, smoke, speed

    modules = (smoke, correct, kernels, speed, longest, faults, ranks)
    return {module.STEP.name: module.STEP for module in modules}


def find_problem(out: Path, minutes: float, dry_run: bool) -> str | None:
    """Return why the command can't run with these arguments, or None."""
    if not minutes > 0:
        return f"--minutes {minutes:g} is too small; use at least 1"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {out} can't be used: {error.strerror}; choose another folder"
    for path in sorted(out.glob("*/*.json")):
        document = read_document(path)
        if document is not None and document["dry_run"] != dry_run:
            kind = "a dry run" if document["dry_run"] else "a run on a GPU"
            return f"--out {out} holds the results of {kind}; choose another folder"
    return None


def find_gpu_problem(session: Session) -> str | None:
    """Return why the GPU can't be used and what to do, or None; a dry run needs none."""
    if session.dry_run:
        return None
    info = session.launcher.catalogue().devices["cuda"]
    if not info.unavailable:
        return None
    return f"{info.unavailable}; {info.remedy}, or use --dry-run: toy sizes on the CPU"


def list_users_of_gpus(session: Session) -> list[str]:
    """Return a sentence for each visible GPU on which another process holds memory."""
    if session.dry_run:
        return []
    return [reason for gpu in read_visible_gpus().visible if (reason := gpu.in_use_reason())]


def report(results: dict[Step, list[Result]], session: Session) -> int:
    """Print a table per step, what failed and what is left; return the exit code."""
    if session.dry_run:
        print("\nDRY RUN on the CPU: toy sizes, no figure means anything")
    for step, kept in results.items():
        print(f"\n== {step.name} ==\n{format_table(step.table(kept))}")
    failed = [
        f"{step.name} {one.item}: {last_line(one.error)}"
        for step, kept in results.items()
        for one in kept
        if one.status == "failed"
    ]
    if failed:
        print("\n".join([f"\n{len(failed)} failed:", *failed]))
        print(f"the whole errors are in the JSON in {session.out}; send that folder all the same")
        print("run again with --retry after a change")
    if session.left:
        print(f"\n{len(session.left)} left: {', '.join(session.left)}\nrun again to continue")
    elif not failed:
        print("\nall passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
