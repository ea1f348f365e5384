"""Step smoke: versions, what Triton needs, the device's ceilings, the doctor, the quick tests."""

import json
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.correct import test_files
from benchmarks.gpu.items import Figures, Item, ItemFailed, Session, Step, plain_table
from benchmarks.gpu.processes import longseq, measure, run_tests
from longseq_bench.core.gpus import python_header
from longseq_bench.doctor import c_compiler, missing_for_triton


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
    figures: Figures = {
        "compiler": c_compiler() or "none", "python_h": str(python_header()),
        "has_python_h": python_header().is_file(),
    }  # fmt: skip
    missing = missing_for_triton()
    if missing and session.device == "cuda":
        text = "; ".join(f"{what}: {remedy}" for what, remedy in missing)
        raise ItemFailed(f"Triton's kernels can't start: {text}", figures)
    return figures


def run_doctor(session: Session) -> Figures:
    """Run `longseq doctor --json`; a missing part, or a CUDA device that it can't use, fails."""
    done = longseq(["doctor", "--json"], max(60.0, session.seconds_left()))
    if done.code:
        raise ItemFailed(f"longseq doctor ended with {done.code}: {done.errors[-1000:]}")
    answer = json.loads(done.out)
    states = {one["name"]: one["state"] for one in answer["findings"]}
    figures = {
        "ok": sum(state == "ok" for state in states.values()), "doctor": answer,
        "notes": ", ".join(name for name, state in states.items() if state == "note") or "none",
    }  # fmt: skip
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
