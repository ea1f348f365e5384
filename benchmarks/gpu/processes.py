"""Processes that items start: measurements, `longseq` commands and pytest, each with a limit."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.items import ROOT, Figures, ItemFailed, Session
from longseq_bench.core.errors import StoreError
from longseq_bench.core.model import Record
from longseq_bench.store import load

_END_S = 10.0
"""Time for a command to end after Ctrl-C; it is part of the limit."""
_TAIL = 1500
_FAILED_TRIALS = 3
"""Exit code of `longseq`."""


_LIBC: Any = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process if its parent is killed: it would go on measuring beside the next call."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class ProcessFailed(Exception):
    """A process that ended with an error. late: it was killed at its limit."""

    def __init__(self, text: str, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


def stream(module: str, argument: Any, limit: float) -> Iterator[Figures]:
    """Run a module of this package with a JSON argument, and yield the objects that it prints.

    Raises ProcessFailed if it does not end with exit code 0 within `limit` seconds.
    """
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", json.dumps(argument)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            env=_environment(), preexec_fn=die_with_parent,
        )  # fmt: skip
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if code:
            errors.seek(0)
            printed = errors.read().strip()[-_TAIL:]
            cause = f"killed after {limit:.0f} s" if late.is_set() else f"exit code {code}"
            raise ProcessFailed(f"{module} ended with {cause}: {printed}", late.is_set())


@dataclass(frozen=True)
class Command:
    """A `longseq` command that has ended. late: by a signal at its limit."""

    code: int
    out: str
    errors: str
    late: bool


def longseq(arguments: Sequence[str], limit: float) -> Command:
    """Run a `longseq` command. Shortly before the limit Ctrl-C ends it; its records are kept."""
    process = subprocess.Popen(
        [sys.executable, "-m", "longseq_bench", *arguments], cwd=ROOT, env=_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        for sent, seconds in (
            (None, limit - _END_S),
            (signal.SIGINT, _END_S),
            (signal.SIGKILL, 60),
        ):
            if sent:
                process.send_signal(sent)
            with suppress(subprocess.TimeoutExpired):
                out, errors = process.communicate(timeout=max(0.0, seconds))
                return Command(process.returncode, out, errors, late=sent is not None)
    finally:
        process.kill()
        process.wait()
    raise ItemFailed(f"longseq {arguments[0]} does not end")


def run_with_records(
    session: Session, arguments: Sequence[str], folder: str, unit: str
) -> tuple[list[Record], bool]:
    """Run a `longseq` command whose records go to a folder of the session.

    The next call of a command that the deadline cut continues there. unit: what a record is.
    Returns all records, and True if a trial failed. Raises Unfinished at the deadline if at least
    one record is new, ItemFailed if none is, or if the command failed.
    """
    out = session.out.absolute() / folder
    before, limit = len(records_in(out)), session.seconds_left()
    done = longseq([*arguments, "--out", str(out)], limit)
    records = records_in(out)
    if done.late and done.code not in (0, _FAILED_TRIALS):
        raise session.cut(f"{len(records)} {unit} are done", limit, len(records) > before)
    if done.code not in (0, _FAILED_TRIALS):
        raise ItemFailed(f"longseq {arguments[0]} ended with {done.code}: {done.errors[-_TAIL:]}")
    return records, done.code == _FAILED_TRIALS


def records_in(folder: Path) -> list[Record]:
    """Return the records in a folder; none if nothing has been written yet."""
    try:
        return load(folder).records
    except StoreError:
        return []


def run_tests(files: Sequence[str], workers: int, folder: Path, session: Session) -> Figures:
    """Run the tests for CUDA of some files. workers: processes side by side, by pytest-xdist.

    Raises ItemFailed, with the text of each failure, if one fails, or if none runs on a GPU.
    """
    if find_spec("pytest") is None:
        raise ItemFailed("pytest is not installed: pip install pytest")
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "pytest.xml"
    report.unlink(missing_ok=True)
    # the options of pyproject.toml need plug-ins that this machine may lack
    command = [
        sys.executable, "-m", "pytest", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider",
        "-m", "cuda", f"--junitxml={report}", *files,
    ]  # fmt: skip
    command += ["-p", "xdist", "-n", str(workers)] if workers > 1 else []
    limit = session.seconds_left()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=limit,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise session.cut("the tests did not end before the deadline", limit) from None
    if not report.exists():
        raise ItemFailed(f"pytest ended with code {done.returncode}: {_tail(done)}")
    return _read_tests(report, done, session)


def _read_tests(report: Path, done: subprocess.CompletedProcess[str], session: Session) -> Figures:
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad, skipped = {}, {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for problem in (*case.iter("failure"), *case.iter("error")):
            bad[name] = (problem.text or problem.get("message") or "")[-_TAIL:]
        for skip in case.iter("skipped"):
            skipped[name] = skip.get("message") or ""
    passed = len(cases) - len(bad) - len(skipped)
    figures: Figures = {"passed": passed, "failed": len(bad), "skipped": len(skipped)}
    figures |= {"failures": bad, "skip_reasons": sorted(set(skipped.values()))}
    if bad:
        raise ItemFailed(f"{len(bad)} of {len(cases)} tests failed: {', '.join(bad)}", figures)
    if done.returncode:
        raise ItemFailed(f"pytest ended with code {done.returncode}: {_tail(done)}", figures)
    if not passed and not session.dry_run:
        raise ItemFailed(f"none of {len(cases)} tests ran", figures)
    return figures


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr).strip()[-_TAIL:]


def _environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout, without the interpreter."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
