"""The GPU acceptance command: items are kept and resumed, and a dry run does every step."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import faults, kernels, longest, processes, speed
from benchmarks.gpu.items import (
    Figures,
    Item,
    ItemFailed,
    Result,
    Session,
    Step,
    Unfinished,
    format_table,
    plain_table,
    run_step,
)
from benchmarks.gpu.processes import Command
from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry
from longseq_bench.core.model import Record, Trial, Workload
from longseq_bench.core.options import OptionSpec
from tests.fake_nvml import FakeGpu, install
from tests.make import outcome, record, trial, write_records

ROOT = Path(__file__).parents[1]


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
        def run(name: str) -> Figures:
            self.runs.append(name)
            result: Figures = self.functions[name]()
            return result

        return [Item(name, lambda name=name: run(name)) for name in self.functions]  # type: ignore[misc]


def fail(error: Exception) -> Any:
    def run() -> Figures:
        raise error

    return run


def test_a_failed_item_is_kept_and_the_next_runs(tmp_path: Path) -> None:
    toy = Counted(
        first=fail(ItemFailed("no such kernel", {"seen": 3})), second=fail(ValueError("why")),
        third=lambda: {"rate": 2.5},
    )  # fmt: skip
    call = session(tmp_path)
    results = run_step(toy.step, call)
    assert [one.status for one in results] == ["failed", "failed", "ok"]
    first, second, third = (read(tmp_path / "toy" / f"{name}.json") for name in toy.functions)
    assert (first["status"], first["error"], first["figures"]) == (
        "failed", "no such kernel", {"seen": 3},
    )  # fmt: skip
    assert second["error"].splitlines()[-1] == "ValueError: why"
    assert (third["status"], third["error"], third["figures"]) == ("ok", None, {"rate": 2.5})
    assert third["dry_run"] is True
    assert command.report({toy.step: results}, call) == 1


def test_a_second_call_skips_what_is_finished(tmp_path: Path) -> None:
    toy = Counted(good=lambda: {"rate": 1}, bad=fail(ItemFailed("no")))
    first = run_step(toy.step, session(tmp_path))
    assert run_step(toy.step, session(tmp_path)) == first
    assert toy.runs == ["good", "bad"]
    toy.functions["bad"] = lambda: {"rate": 2}
    again = run_step(toy.step, session(tmp_path, retry=True))
    assert toy.runs == ["good", "bad", "bad"]
    assert [one.status for one in again] == ["ok", "ok"]


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


def test_an_item_without_progress_in_a_whole_call_fails(tmp_path: Path) -> None:
    """Otherwise every call would begin it again."""
    call = session(tmp_path, minutes=10)
    assert isinstance(call.cut("0 done", limit=590.0, progress=True), Unfinished)
    assert isinstance(call.cut("0 done", limit=30.0), Unfinished)
    assert str(call.cut("0 done", limit=590.0)) == "0 done; 590 s are too short, use --minutes"


def test_items_that_can_not_be_listed_are_a_failed_item(tmp_path: Path) -> None:
    def items(session: Session) -> Sequence[Item]:
        raise OSError("no config")

    (result,) = run_step(Step("toy", items, plain_table), session(tmp_path))
    assert result.status == "failed"
    assert "no config" in (result.error or "")


def test_a_dry_run_and_a_run_on_a_gpu_never_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = Counted(one=dict)
    run_step(toy.step, session(tmp_path))
    assert command.main(["smoke", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"benchmarks.gpu: --out {tmp_path} holds the results of a dry run; choose another folder\n"
    )


def test_a_machine_without_a_gpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(["smoke", "--out", str(tmp_path)]) == 2
    assert "or use --dry-run: toy sizes on the CPU" in capsys.readouterr().err
    assert command.main(["smoke", "--out", str(tmp_path), "--minutes", "0"]) == 2
    assert "--minutes 0 is too small" in capsys.readouterr().err


def on_a_gpu(out: Path, **device: Any) -> Session:
    """Return a session on a machine with this CUDA device."""
    call = Session(out, "cuda")
    devices = {"cuda": DeviceInfo(**device)}
    call.__dict__["launcher"] = SimpleNamespace(
        catalogue=lambda: Catalogue(implementations={}, devices=devices)
    )
    return call


def test_a_gpu_that_can_not_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Without it each item would fail, one after the other."""
    reason = "this torch has no kernels for GTX 1080 (compute capability 6.1)"
    call = on_a_gpu(tmp_path, unavailable=reason, remedy="install a torch that was built for it")
    assert command.find_gpu_problem(call) == (
        f"{reason}; install a torch that was built for it, or use --dry-run: toy sizes on the CPU"
    )
    assert command.find_gpu_problem(on_a_gpu(tmp_path, name="H100", count=1)) is None
    assert command.find_gpu_problem(session(tmp_path)) is None


def test_another_process_on_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, FakeGpu("H100", "GPU-b", 2**30, 2**35, processes={4242: 2**34}))
    found = command.list_users_of_gpus(on_a_gpu(tmp_path, name="H100", count=1))
    assert found == ["GPU 0 is in use: process 4242 holds 16 GiB"]
    assert command.list_users_of_gpus(session(tmp_path)) == []


def test_a_failed_item_is_named_with_the_last_line_of_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = Counted(good=dict, bad=fail(ItemFailed("Traceback:\n  line 3\nValueError: why")))
    assert command.report({toy.step: run_step(toy.step, session(tmp_path))}, session(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "\n1 failed:\ntoy bad: ValueError: why\nthe whole errors are in the JSON" in printed


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("copy_bytes_per_s", 3.35e12, "copy 3.35 TB/s"),
        ("bfloat16_flops", 7.9e14, "bfloat16 790 TFLOP/s"),
        ("memory_before", 3 * 2**30, "memory_before 3 GiB"),
        ("devices", 1, "devices 1"),
        ("driver", "580.1", "driver 580.1"),
    ],
)
def test_figures_have_units(name: str, value: str | float, text: str) -> None:
    assert plain_table([Result("one", "ok", 1.0, {name: value})])[1] == ("one", "ok", text)


def test_columns_of_a_table_are_aligned() -> None:
    assert format_table([("a", "long"), ("longer", 1)]) == "a       long\nlonger  1"


# ---- kernels -----------------------------------------------------------------------------------

CHOSEN = {"tile": [128, 64, 8, 3, 128], "seconds": 2e-3, "difference": 0.0}
FASTER = {"tile": [64, 64, 4, 3, None], "seconds": 1e-3, "difference": 1e-3}


def test_the_grid_begins_with_the_chosen_tile_and_has_no_copies() -> None:
    chosen = [128, 64, 8, 3, 128]
    tiles = kernels.grid("forward", chosen)
    assert tiles[:2] == [chosen, [128, 64, 8, 3, None]]
    assert len({json.dumps(tile) for tile in tiles}) == len(tiles) >= 30
    assert [64, 128, 8, 3, None] in tiles
    assert [32, 128, 8, 2, None] in kernels.grid("dkv", [64, 128, 8, 3, None])


def test_the_best_tile_is_the_fastest_with_the_same_result() -> None:
    other = {"tile": [32, 32, 4, 2, None], "does_not_fit": "too large"}
    assert kernels.judge([CHOSEN, FASTER, other])["best"] == FASTER
    wrong = {**FASTER, "difference": 0.5}
    with pytest.raises(ItemFailed, match=r"tiles with another result .*64, 64") as caught:
        kernels.judge([CHOSEN, wrong])
    assert caught.value.figures["best"] == CHOSEN


def test_a_chosen_tile_that_does_not_run_fails() -> None:
    with pytest.raises(ItemFailed, match=r"the chosen tile .*: illegal memory access"):
        kernels.judge([{"tile": CHOSEN["tile"], "error": "illegal memory access"}, FASTER])


def test_a_missing_triton_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch brings none."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ItemFailed, match="triton is not installed: pip install triton"):
        kernels.run_tiles(session(tmp_path), "dkv", 64, True)


def test_a_tile_that_ends_the_process_is_kept_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    started: list[int] = []

    def stream(module: str, argument: Any, limit: float) -> Any:
        started.append(len(argument["tiles"]))
        for i, tile in enumerate(argument["tiles"]):
            if tile[:2] == [64, 64] and tile[2:4] == [8, 3]:
                raise kernels.ProcessFailed("illegal memory access")
            yield {"tile": tile, "seconds": 1e-3 * (i + 1), "difference": 0.0}

    monkeypatch.setattr(kernels, "stream", stream)
    monkeypatch.setattr(kernels, "_capability", lambda session: 9)
    call = Session(tmp_path, "cuda")
    (tmp_path / "kernels").mkdir()
    figures = kernels.run_tiles(call, "forward", 64, True)
    (bad,) = [one for one in figures["tiles"] if "error" in one]
    assert bad["tile"] == [64, 64, 8, 3, None]
    assert len(started) == 2
    assert started[0] == len(figures["tiles"])
    assert kernels.run_tiles(call, "forward", 64, True) == figures
    assert len(started) == 2


def test_the_table_of_kernels_has_the_share_of_ideal() -> None:
    """Dense time times density over the time; dq and dkv are one backward."""
    pairs = {"density": 0.05, "pairs": 2**20}
    dense = {
        "cudnn": {"forward_s": 20e-3, "backward_s": 60e-3, "forward_flops": 4e14,
                  "backward_flops": 3e14},
        "flex": {"unavailable": "no compiler"},
    }  # fmt: skip
    results = [
        Result("dense-d64-full", "ok", 1.0, {"kernels": dense}),
        *(
            Result(f"{kernel}-d64-full", "ok", 1.0, {"chosen": CHOSEN, "best": {**FASTER, **pairs}})
            for kernel in kernels.KERNELS
        ),
    ]
    rows = {row[0]: row for row in kernels.make_table(results)}
    assert rows["dense-d64-full cudnn forward"][5:7] == ("20.000 ms", "400")
    assert rows["dense-d64-full flex forward"][5:7] == ("–", "–")
    flops = f"{2 * 2 * 2**20 * 64 * 8 / 1e-3 / 1e12:.0f}"
    expected = ("128×64 8w 3s 128r", "2.000 ms", "64×64 4w 3s", "1.000 ms", flops, "1.00")
    assert rows["forward-d64-full"][2:] == expected
    assert rows["dq-d64-full"][-1] == "with dkv"
    assert rows["dkv-d64-full"][-1] == "1.50"


TILE = re.compile(
    r"\| (\d+) \| ([a-z ]+) \| (\d+) \| (?:full|causal) \| (\d+)×(\d+) (\d)w (\d)s \|"
)


def test_the_published_compile_table_has_the_tiles_that_are_chosen() -> None:
    """Make it again with `python -m benchmarks.triton_static --markdown`."""
    torch = pytest.importorskip("torch")
    tiles = pytest.importorskip("longseq_bench.kernels.triton_tiles")
    decode = pytest.importorskip("longseq_bench.kernels.triton_decode")
    rows = TILE.findall((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"))
    assert len(rows) == 3 * 5 * 3 * 2 + 3 * 3
    for capability, kernel, head_dim, *sizes in rows:
        chosen = (
            decode.tile_of(1, int(head_dim), torch.bfloat16) if kernel == "decode"
            else tiles.select_shape(
                kernel, 128, int(head_dim), torch.bfloat16, int(capability) // 10
            )
        )  # fmt: skip
        expected = [chosen.queries, chosen.keys, chosen.warps, chosen.stages]
        assert list(map(int, sizes)) == expected, (capability, kernel, head_dim)


# ---- speed -------------------------------------------------------------------------------------


def sweep_ends(
    out: Path, monkeypatch: pytest.MonkeyPatch, code: int, records: Sequence[Record] = ()
) -> Figures:
    """Run the step's item, where the command writes these records and ends with a code."""

    def command(arguments: Sequence[str], limit: float) -> Command:
        if records:
            write_records(arguments[arguments.index("--out") + 1], records)
        return Command(code, "", "Traceback: why")

    monkeypatch.setattr(processes, "longseq", command)
    return speed.run_sweep(session(out))


def test_a_sweep_that_the_deadline_cut_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = record(trial(), outcome(facts={"kernel": "cudnn"}, time=0.1))
    with pytest.raises(Unfinished, match="1 trials are done"):
        sweep_ends(tmp_path, monkeypatch, 130, [done])
    with pytest.raises(ItemFailed, match=r"1 trials are done; .* use --minutes"):
        sweep_ends(tmp_path, monkeypatch, 130)
    figures = sweep_ends(tmp_path, monkeypatch, 0)
    assert [(row["time_s"], row["kernel"]) for row in figures["rows"]] == [(0.1, "cudnn")]


def test_a_sweep_with_wrong_results_fails_with_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [
        record(trial(), outcome(time=0.1)),
        record(trial("ring"), outcome("wrong", "dv is 2", "check")),
        record(trial("dense"), outcome("oom", "no memory", "forward")),
    ]  # fmt: skip
    with pytest.raises(ItemFailed, match="1 trials failed: ring 4096: dv is 2") as caught:
        sweep_ends(tmp_path, monkeypatch, 3, records)
    assert [row["status"] for row in caught.value.figures["rows"]] == ["ok", "wrong", "oom"]
    with pytest.raises(ItemFailed, match="ended with 1: Traceback: why"):
        sweep_ends(tmp_path / "other", monkeypatch, 1)


# ---- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "left", "problem"),
    [
        (("oom", "ok"), (0, 0), None),
        (("error", "ok"), (0, 0), "error instead of oom"),
        (("oom", "crashed"), (0, 0), "the next trial: crashed"),
        (("oom", "ok"), (2**30, 0), "memory or processes are left"),
        (("oom", "ok"), (0, 1), "memory or processes are left"),
    ],
)
def test_a_fault_that_leaves_a_trace_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[Any, Any],
    left: tuple[int, int], problem: str | None,
) -> None:  # fmt: skip
    call, outcomes = session(tmp_path), iter(outcome(status, "why") for status in statuses)
    call.__dict__["launcher"] = SimpleNamespace(catalogue=lambda: None)
    traces = iter([faults.Trace(2**30, 2), faults.Trace(2**30 + left[0], 2 + left[1])])
    monkeypatch.setattr(faults, "run", lambda *_, **__: next(outcomes))
    monkeypatch.setattr(faults.Trace, "now", lambda device: next(traces))
    monkeypatch.setattr(faults, "FREE_WITHIN_S", 0.0)
    fault = faults.Fault("bad-eats", ("oom",))
    if problem is None:
        assert faults.provoke(call, fault)["next_status"] == "ok"
        return
    with pytest.raises(ItemFailed, match=problem):
        faults.provoke(call, fault)


# ---- longest -----------------------------------------------------------------------------------


def test_a_search_has_the_command_line_of_its_trial() -> None:
    specs = [
        OptionSpec(name="kernel", kind="str", default="auto", help=""),
        OptionSpec(name="chunk", kind="int", default=None, help="", optional=True),
    ]
    catalogue = Catalogue(implementations={"ring": Entry(summary="", options=specs)}, devices={})
    search = Trial(
        implementation="ring", options={"kernel": "cudnn", "chunk": None}, device="cuda",
        workload=Workload(seq_len=1, heads=8, head_dim=128, dtype="bfloat16", mode="train"),
        memory_budget=2**31, time_budget=10.0, repeats=0,
    )  # fmt: skip
    assert longest.name(search, catalogue) == "ring kernel=cudnn train d128 2GiB"
    words = " ".join(longest.arguments(search, catalogue))
    assert words.startswith("maxlen --impl ring -o kernel=cudnn --device cuda --dtype bfloat16")
    for part in ("--mode train", "--head-dim 128", "--memory-budget 2147483648"):
        assert part in words
    assert "--time-budget 10.0s" in words
    assert "--causal" not in words


def test_a_search_that_the_deadline_cut_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = session(tmp_path)
    folders: list[str] = []

    def command(arguments: Sequence[str], limit: float) -> Command:
        folders.append(arguments[arguments.index("--out") + 1])
        if len(folders) == 1:
            write_records(folders[0], [record(trial(), outcome(time=0.1))])
        return Command(130, "", "")

    monkeypatch.setattr(processes, "longseq", command)
    (item,) = longest.list_items(call)
    with pytest.raises(Unfinished, match="1 runs are done"):
        item.run()
    with pytest.raises(ItemFailed, match=r"1 runs are done; .* use --minutes"):
        item.run()
    assert folders[0] == folders[1]


# ---- the dry run -------------------------------------------------------------------------------

ITEMS = {
    "smoke": 5, "correct": 1, "kernels": 2, "speed": 1, "longest": 1, "faults": 5, "ranks": 3,
}  # fmt: skip
ABSENT = ("altair", "vl_convert", "hypothesis", "jsonschema", "mkdocs", "deepspeed")
"""Packages that a machine with a GPU may lack."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which those packages can't be imported."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ABSENT:
        (folder / f"{name}.py").write_text(f"raise ImportError('there is no {name}')\n")
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    # pytest would load what is installed but can't be imported here
    return {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def dry_run(out: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "all", "--dry-run", "--out", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.slow
def test_a_dry_run_does_every_step_and_a_second_call_none(
    tmp_path: Path, bare: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    done = dry_run(tmp_path, bare)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        step: {path.stem: read(path) for path in (tmp_path / step).glob("*.json")} for step in ITEMS
    }
    assert {step: len(items) for step, items in found.items()} == ITEMS
    for items in found.values():
        for item in items.values():
            assert item["status"] == "ok", item
            assert item["figures"]
    assert_plausible({s: {n: i["figures"] for n, i in items.items()} for s, items in found.items()})
    assert "DRY RUN" in done.stdout
    assert "all passed" in done.stdout
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.json")}
    assert command.main(["all", "--dry-run", "--out", str(tmp_path)]) == 0
    assert not any(line.startswith("[") for line in capsys.readouterr().out.splitlines())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.json")} == before


def assert_plausible(figures: dict[str, dict[str, Figures]]) -> None:
    ceilings = figures["smoke"]["ceilings"]
    assert 1e8 < ceilings["copy_bytes_per_s"] < 1e12
    assert 1e8 < ceilings["float32_flops"] < 1e14
    assert figures["smoke"]["tests"]["skipped"] > 0
    assert figures["smoke"]["versions"]["torch"].startswith("2.")
    for times in figures["kernels"]["dense-d64-full"]["kernels"].values():
        assert "unavailable" in times or 0 < times["forward_s"] < 10
    (chosen, other) = figures["kernels"]["dkv-d64-causal"]["tiles"]
    assert 16 < chosen["registers"] <= 255
    assert chosen["tile"] != other["tile"]
    names = {row["name"]: row for row in figures["speed"]["sweep"]["rows"]}
    assert set(names) == {"sdpa", "block-sparse"}
    assert all(0 < row["time_s"] < 10 for row in names.values())
    assert 0 < names["block-sparse"]["share_of_ideal"] < 10
    (search,) = figures["longest"].values()
    assert 1000 < search["max_tokens"] < 2048
    assert search["limited_by"] == "memory"
    assert {one["next_status"] for one in figures["faults"].values()} == {"ok"}
    assert figures["faults"]["kill--9"]["status"] == "crashed"
    assert figures["faults"]["SIGSTOP"]["status"] == "hang"
    assert 0 <= figures["ranks"]["ring"]["exposed_share"] < 1
    assert figures["ranks"]["ring"]["bytes_sent"] > 0
