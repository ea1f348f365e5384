"""The GPU acceptance command: items are kept and resumed. `.ci/run` has its dry run."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import faults, processes, speed
from benchmarks.gpu.items import (
    Figures,
    Item,
    ItemFailed,
    Session,
    Step,
    Unfinished,
    plain_table,
    run_step,
)
from benchmarks.gpu.processes import Command
from longseq_bench.core.catalogue import Catalogue, DeviceInfo
from tests.make import outcome, record, trial, write_records


def session(out: Path, **settings: Any) -> Session:
    return Session(out, "cpu", dry_run=True, **settings)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# ---- items -------------------------------------------------------------------------------------


class Counted:
    """A step of named functions that counts its runs."""

    def __init__(self, **functions: Any) -> None:
        self.functions, self.runs = functions, list[str]()
        self.step = Step("toy", self.items, plain_table)

    def items(self, session: Session) -> Sequence[Item]:
        return [Item(name, partial(self.run, name)) for name in self.functions]

    def run(self, name: str) -> Figures:
        self.runs.append(name)
        result: Figures = self.functions[name]()
        return result


def fail(error: Exception) -> Any:
    def run() -> Figures:
        raise error

    return run


def test_a_failed_item_is_kept_and_a_second_call_skips_what_is_finished(tmp_path: Path) -> None:
    no_kernel, why = ItemFailed("no such kernel", {"seen": 3}), ValueError("why")
    toy = Counted(first=fail(no_kernel), second=fail(why), third=lambda: {"rate": 2.5})
    call = session(tmp_path)
    results = run_step(toy.step, call)
    assert [one.status for one in results] == ["failed", "failed", "ok"]
    first, second, third = (read(tmp_path / "toy" / f"{name}.json") for name in toy.functions)
    assert (first["error"], first["figures"]) == ("no such kernel", {"seen": 3})
    assert second["error"].splitlines()[-1] == "ValueError: why"
    assert (third["error"], third["figures"], third["dry_run"]) == (None, {"rate": 2.5}, True)
    assert command.report({toy.step: results}, call) == 1
    assert run_step(toy.step, session(tmp_path)) == results
    assert toy.runs == ["first", "second", "third"]
    toy.functions["second"] = dict
    again = run_step(toy.step, session(tmp_path, retry=True))
    assert toy.runs[3:] == ["first", "second"]
    assert [one.status for one in again] == ["failed", "ok", "ok"]


def test_the_deadline_leaves_items_to_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, left = session(tmp_path), [60.0]
    monkeypatch.setattr(call, "seconds_left", lambda: left[0])

    def slow() -> Figures:
        left[0] = 0.0
        return {"rate": 1}

    toy = Counted(cut=fail(Unfinished("3 of 9 tiles are done")), slow=slow, late=dict)
    results = run_step(toy.step, call)
    assert toy.runs == ["cut", "slow"]
    assert [one.item for one in results] == ["slow"]
    assert command.report({toy.step: results}, call) == 0
    printed = capsys.readouterr().out
    assert "2 left: toy cut: 3 of 9 tiles are done, toy late\nrun again to continue" in printed
    assert "all passed" not in printed
    toy.functions["cut"] = dict
    run_step(toy.step, session(tmp_path))
    assert toy.runs == ["cut", "slow", "cut", "late"]


def test_a_dry_run_and_a_run_on_a_gpu_never_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_step(Counted(one=dict).step, session(tmp_path))
    assert command.main(["smoke", "--out", str(tmp_path)]) == 2
    problem = f"--out {tmp_path} holds the results of a dry run; choose another folder"
    assert capsys.readouterr().err == f"benchmarks.gpu: {problem}\n"


def test_a_machine_without_a_usable_gpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Without it each item would fail, one after the other."""
    reason = "this torch has no kernels for GTX 1080 (compute capability 6.1)"
    call, remedy = Session(tmp_path, "cuda"), "install a torch that was built for it"
    devices = {"cuda": DeviceInfo(unavailable=reason, remedy=remedy)}
    catalogue = Catalogue(implementations={}, devices=devices)
    call.__dict__["launcher"] = SimpleNamespace(catalogue=lambda: catalogue)
    words = f"{reason}; {remedy}, or use --dry-run: toy sizes on the CPU"
    assert command.find_gpu_problem(call) == words
    assert command.find_gpu_problem(session(tmp_path)) is None


# ---- speed -------------------------------------------------------------------------------------


def test_a_sweep_is_cut_by_the_deadline_or_fails_with_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its item runs where the command writes these records and ends with a code."""
    done = record(trial(), outcome(facts={"kernel": "cudnn"}, time=0.1))
    wrong = record(trial("ring"), outcome("wrong", "dv is 2", "check"))
    ends = [(130, [done]), (3, [done, wrong])]

    def longseq(arguments: Sequence[str], limit: float) -> Command:
        code, records = ends.pop(0)
        write_records(arguments[arguments.index("--out") + 1], records)
        return Command(code, "", "")

    monkeypatch.setattr(processes, "longseq", longseq)
    with pytest.raises(Unfinished, match="1 trials are done"):
        speed.run_sweep(session(tmp_path))
    with pytest.raises(ItemFailed, match="1 trials failed: ring 4096: dv is 2") as caught:
        speed.run_sweep(session(tmp_path))
    assert [row["status"] for row in caught.value.figures["rows"]] == ["ok", "wrong"]


# ---- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "left", "problem"),
    [
        (("error", "ok"), 0, "error instead of oom"),
        (("oom", "crashed"), 0, "the next trial: crashed"),
        (("oom", "ok"), 1, "memory or processes are left"),
    ],
)
def test_a_fault_that_leaves_a_trace_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: Any, left: int, problem: str
) -> None:
    call, outcomes = session(tmp_path), iter(outcome(status, "why") for status in statuses)
    call.__dict__["launcher"] = SimpleNamespace(catalogue=lambda: None)
    traces = iter([faults.Trace(2**30, 2), faults.Trace(2**30, 2 + left)])
    monkeypatch.setattr(faults, "run", lambda *_, **__: next(outcomes))
    monkeypatch.setattr(faults.Trace, "now", lambda device: next(traces))
    monkeypatch.setattr(faults, "FREE_WITHIN_S", 0.0)
    with pytest.raises(ItemFailed, match=problem):
        faults.provoke(call, faults.Fault("bad-eats", ("oom",)))
