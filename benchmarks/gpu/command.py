"""Check the arguments of the command, run its steps, and print their tables."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.items import (
    DRY_RUN,
    Result,
    Session,
    Step,
    format_table,
    last_line,
    read_document,
    run_steps,
)
from benchmarks.gpu.readme import readme_tables
from longseq_bench.core.gpus import read_visible_gpus

BAD_INPUT, INTERRUPTED = 2, 130


def run(names: Sequence[str], out: Path, minutes: float, retry: bool, dry_run: bool) -> int:
    """Run steps by value and return the exit code."""
    session = Session(out, "cpu" if dry_run else "cuda", dry_run, minutes, retry)
    if problem := find_problem(session):
        print(f"benchmarks.gpu: {problem}", file=sys.stderr)
        return BAD_INPUT
    for reason in list_users_of_gpus(session):
        print(f"benchmarks.gpu: {reason}; figures will be wrong (docs/gpu.md)", file=sys.stderr)
    steps = [import_module(f"benchmarks.gpu.{name}").STEP for name in names]
    try:
        results = run_steps(steps, session)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED
    return report(results, session)


def find_problem(session: Session) -> str | None:
    """Return why the command can't run, and what to do; None if it can."""
    out = session.out
    least = 0.1 if session.dry_run else 3
    if not session.minutes >= least:
        return f"--minutes {session.minutes:g} is too small; use at least {least:g}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {out} can't be used: {error.strerror}; choose another folder"
    if problem := find_gpu_problem(session):
        return problem
    for path in sorted(out.glob("*/*.json")):
        document = read_document(path)
        if document is not None and document["hardware"] != session.hardware:
            kinds = [
                name if name == DRY_RUN else f"a run on {name}"
                for name in (document["hardware"], session.hardware)
            ]
            return (
                f"--out {out} holds the results of {kinds[0]}, this would be {kinds[1]}; choose "
                "another folder"
            )
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
    if tables := readme_tables(session):
        print(f"\n== for the README ==\n{tables}")
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
