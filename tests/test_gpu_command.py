"""The GPU acceptance command: items are kept and resumed. `.ci/run` has its dry run."""

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import __main__ as main_module
from benchmarks.gpu import command, faults, kernels, processes, speed
from benchmarks.gpu.items import (
    ROOT,
    Figures,
    Item,
    ItemFailed,
    Result,
    Session,
    Step,
    Unfinished,
    plain_table,
    run_steps,
)
from benchmarks.gpu.processes import Command, ProcessFailed
from benchmarks.gpu.readme import USUAL, readme_tables
from longseq_bench.core.catalogue import Catalogue, DeviceInfo
from tests.make import outcome, record, trial, write_records


def session(out: Path, **settings: Any) -> Session:
    return Session(out, "cpu", dry_run=True, **settings)


class Counted:
    """A step of named functions that counts its runs."""

    def __init__(self, **functions: Any) -> None:
        self.functions, self.runs = functions, list[str]()
        self.step = Step("toy", self.items, plain_table)

    def items(self, session: Session) -> Sequence[Item]:
        return [
            Item(name, partial(self.run, name), 30, 2 if "later" in name else 1)
            for name in self.functions
        ]

    def run(self, name: str) -> Figures:
        self.runs.append(name)
        result: Figures = self.functions[name]()
        return result


def run_step(step: Step, session: Session) -> list[Result]:
    return run_steps([step], session)[step]


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
    first, second, third = (
        json.loads((tmp_path / "toy" / f"{name}.json").read_text()) for name in toy.functions
    )
    assert (first["error"], first["figures"]) == ("no such kernel", {"seen": 3})
    assert second["error"].splitlines()[-1] == "ValueError: why"
    assert (third["error"], third["figures"]) == (None, {"rate": 2.5})
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
    left_to_do = "2 left: toy cut: 3 of 9 tiles are done, toy late (12 s)\nrun again to continue"
    assert left_to_do in printed
    assert "all passed" not in printed
    toy.functions["cut"] = dict
    run_step(toy.step, session(tmp_path))
    assert toy.runs == ["cut", "slow", "cut", "late"]


def test_what_comes_first_runs_before_the_rest_unless_it_would_end_too_late(tmp_path: Path) -> None:
    first, second = Counted(one=dict, later=dict), Counted(two=dict)
    first.runs = second.runs
    steps = [first.step, Step("other", second.items, plain_table)]
    run_steps(steps, session(tmp_path / "a"))
    assert first.runs == ["one", "two", "later"]
    call = session(tmp_path / "b", minutes=0.5)
    call.dry_run, call.__dict__["hardware"] = False, "H100"
    second.step = Step("other", lambda _: [Item("two", dict, 10)], plain_table)
    run_steps([first.step, second.step], call)
    assert (first.runs[3:], call.left) == ([], ["toy one (30 s)", "toy later (30 s)"])


def test_results_of_different_gpus_never_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = session(tmp_path)
    call.__dict__["hardware"] = "NVIDIA H100"
    run_step(Counted(one=dict).step, call)
    assert command.find_problem(call) is None
    arguments = ["brief", "--dry-run", "--out", str(tmp_path)]
    assert main_module.main(arguments) == 2
    problem = f"--out {tmp_path} holds the results of a run on NVIDIA H100, this would be a dry run"
    assert capsys.readouterr().err == f"benchmarks.gpu: {problem}; choose another folder\n"


def test_a_machine_without_a_usable_gpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Without it each item would fail, one after the other."""
    call = Session(tmp_path, "cuda")
    devices = {"cuda": DeviceInfo(unavailable="no kernels for GTX 1080", remedy="install others")}
    catalogue = Catalogue(implementations={}, devices=devices)
    call.__dict__["launcher"] = SimpleNamespace(catalogue=lambda: catalogue)
    words = "no kernels for GTX 1080; install others, or use --dry-run: toy sizes on the CPU"
    assert command.find_gpu_problem(call) == words
    assert command.find_gpu_problem(session(tmp_path)) is None


def test_a_sweep_is_cut_by_the_deadline_or_fails_with_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its item runs where the command writes these records and ends with a code."""
    done = record(trial(), outcome(facts={"kernel": "cudnn"}, time=0.1))
    wrong = record(trial("ring"), outcome("wrong", "dv is 2", "check"))
    ends = [(-2, [done]), (3, [done, wrong])]

    def longseq(arguments: Sequence[str], limit: float) -> Command:
        code, records = ends.pop(0)
        write_records(arguments[arguments.index("--out") + 1], records)
        return Command(code, "", "", late=code == -2)

    monkeypatch.setattr(processes, "longseq", longseq)
    (tmp_path / "speed").mkdir()
    cell = speed.toy("speed", "toy", [{"sdpa": {}}], {})
    with pytest.raises(Unfinished, match="1 trials are done"):
        speed.run_cell(session(tmp_path), cell)
    with pytest.raises(ItemFailed, match="1 trials failed: ring 4096: dv is 2") as caught:
        speed.run_cell(session(tmp_path), cell)
    assert [row["status"] for row in caught.value.figures["rows"]] == ["ok", "wrong"]


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


def measured(job: list[Any]) -> Figures:
    """Return figures of a job: tiles of 32 keys are the fastest, those of 128 by 128 are wrong."""
    if job[0] == "dense":
        return {"job": job, "kernels": {"cudnn": {"forward_s": 0.02, "backward_s": 0.05}}}
    queries, keys, *_ = job[3]
    times = {"seconds": 1e-3 if keys == 32 else 2e-3, "call_s": 4e-3}
    return {"job": job, "difference": queries * keys // 128**2, "density": 0.05} | times


def test_tiles_continue_after_a_deadline_and_after_one_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Session(tmp_path, "cuda")
    call.__dict__ |= {"hardware": "NVIDIA H100", "capability": 90}
    (tmp_path / "kernels").mkdir()
    late, crash = ProcessFailed("late", True), ProcessFailed("illegal access")
    ends = iter([(5, late), (2, crash), (999, None)])

    def stream(module: str, argument: Any, limit: float) -> Iterator[Figures]:
        if argument["what"] == "compile":
            yield {"job": argument["jobs"][-1], "does_not_fit": "no shared memory"}
            return
        count, error = next(ends)
        yield from map(measured, argument["jobs"][:count])
        if error:
            raise error

    monkeypatch.setattr(kernels, "SHAPES", ((64, True),))
    monkeypatch.setattr(kernels, "stream", stream)
    with pytest.raises(Unfinished, match="tiles are left"):
        kernels.run_tiles(call)
    with pytest.raises(ItemFailed, match="another result than the chosen tile's") as caught:
        kernels.run_tiles(call)
    results, jobs = caught.value.figures["results"], kernels.list_jobs(call)
    assert [one["job"] for one in results] == jobs
    assert [one["job"] for one in results if "error" in one] == [jobs[7]]
    assert [one["job"] for one in results if "does_not_fit" in one] == jobs[-2:]
    forward, _, dkv = caught.value.figures["rows"]
    # 20 ms of dense attention, 5 % of the pairs, 1 ms; 50 ms, and 1 and 2 ms of dq and dkv
    assert (forward["share"], forward["share_of_call"]) == pytest.approx((1.0, 0.25))
    assert (dkv["share"], dkv["share_of_call"]) == pytest.approx((5 / 6, 0.625))
    _, line, _ = (tmp_path / "kernels/tiles.csv").read_text().splitlines()
    start = "dq,2,64,9,no,causal,"
    assert line.startswith(f"{start}64,32,4,2,,1.000,NVIDIA H100,")
    assert start in (ROOT / "longseq_bench/data/tiles.csv").read_text()


def test_the_readme_has_the_fastest_exact_attention_and_block_sparse_beside_it(
    tmp_path: Path,
) -> None:
    ours = {**USUAL}
    other = {**ours, "sparsity": 0.999}
    trials = {"ring": ({}, 0.3), "sdpa": ({}, 0.2)}, {"block-sparse": (ours, 0.01)}
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "mode": "train"}
    for cell in (*trials, {"block-sparse": (other, 0.001)}):
        records = [
            record(trial(name, 131072, options, **shape),
                   outcome(time=[seconds] * 3, density_achieved=0.05 if options else 1.0))
            for name, (options, seconds) in cell.items()
        ]  # fmt: skip
        write_records(tmp_path / "speed" / str(records[0].trial.options), records)
    lines = readme_tables(Session(tmp_path, "cuda")).splitlines()
    assert lines[0] == "| tokens | fastest exact | 32/8×128 |"
    assert lines[2] == "| 128k | train | 200 ms sdpa |"
    assert lines[-1] == "| 128k | train | 10 ms, 20× |"


def call_with_wheels(out: Path, **wheels: str) -> str:
    """Return what the command says with wheels of these names and lines of METADATA."""
    for name, lines in wheels.items():
        info, about = f"{name}-1.dist-info", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        with zipfile.ZipFile(out / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", about + lines)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            wheel.writestr(f"{info}/RECORD", "")
    line = [sys.executable, "-m", "benchmarks.gpu", "smoke", "--minutes", "0"]
    line += ["--out", str(out), "--wheels", str(out)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stderr


def test_wheels_are_installed_and_a_missing_one_is_named(tmp_path: Path) -> None:
    said = call_with_wheels(tmp_path, longseq_toy="Requires-Dist: longseq-part>=1\n", pytest="")
    assert said == f"benchmarks.gpu: {tmp_path} lacks wheels for longseq-part; add them\n"
    said = call_with_wheels(tmp_path, longseq_part="")
    assert said == "benchmarks.gpu: --minutes 0 is too small; use at least 3\n"
    installed = {path.name.split("-")[0] for path in (tmp_path / "site").iterdir()}
    assert installed == {"longseq_toy", "longseq_part"}


def test_after_a_kill_nothing_goes_on_measuring(tmp_path: Path) -> None:
    slow, pid = tmp_path / "slow", tmp_path / "pid"
    slow.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    slow.chmod(0o700)
    code = (
        f"import sys; sys.executable = '{slow}'\n"
        "from benchmarks.gpu.processes import longseq; longseq([], 90)"
    )
    call = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not pid.exists() or not pid.read_text():
        time.sleep(0.05)
    call.kill()
    call.wait()
    end, status = time.monotonic() + 10, Path("/proc", pid.read_text().strip(), "status")
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
