"""Step smoke: versions, what Triton needs, the device's ceilings, the doctor, the quick tests."""

import json
import shutil
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.correct import test_files
from benchmarks.gpu.items import Figures, Item, ItemFailed, Session, Step, plain_table
from benchmarks.gpu.processes import longseq, measure, run_tests


def list_items(session: Session) -> Sequence[Item]:
    """Return the items of the step."""
    return [
        Item("versions", partial(measure, "versions", session)),
        Item("compiler", partial(find_compiler, session)),
        Item("ceilings", partial(measure, "ceilings", session)),
        Item("doctor", partial(run_doctor, session)),
        Item("tests", partial(run_quick_tests, session)),
    ]


def find_compiler(session: Session) -> Figures:
    """Find the C compiler and Python's header, with which Triton builds its launcher."""
    compiler = next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    figures: Figures = {"compiler": compiler or "none", "python_h": str(header)}
    figures["has_python_h"] = header.is_file()
    missing = [
        *([] if compiler else ["gcc: install gcc"]),
        *([] if header.is_file() else [f"{header}: install python3-dev"]),
    ]
    if missing and session.device == "cuda":
        raise ItemFailed(f"Triton needs {', and '.join(missing)}", figures)
    return figures


def run_doctor(session: Session) -> Figures:
    """Run `longseq doctor --json`; a missing part, or a CUDA device that it can't use, fails."""
    done = longseq(["doctor", "--json"], max(60.0, session.seconds_left()))
    if done.code:
        raise ItemFailed(f"longseq doctor ended with {done.code}: {done.errors[-1000:]}")
    answer = json.loads(done.out)
    states = {one["name"]: one["state"] for one in answer["findings"]}
    figures = {"ok": sum(state == "ok" for state in states.values()), "doctor": answer}
    bad = [one for one in answer["findings"] if one["state"] == "missing"]
    if session.device == "cuda" and states.get("cuda") != "ok":
        bad += [one for one in answer["findings"] if one["name"] == "cuda"]
    if bad:
        raise ItemFailed("; ".join(f"{one['name']}: {one['found']}" for one in bad), figures)
    return figures


def run_quick_tests(session: Session) -> Figures:
    """Run the tests for CUDA that take seconds."""
    files = test_files(session)
    return run_tests(files, "cuda and not slow", session.out / "smoke", session)


STEP = Step("smoke", list_items, plain_table)
