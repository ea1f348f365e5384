"""Every command: what it says, what it writes, and the JSON that programs rely on."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from longseq_bench import environment
from longseq_bench.api import machine
from longseq_bench.api.grid import _parse
from longseq_bench.api.recommendation import USUAL
from longseq_bench.api.results import Results
from longseq_bench.cli import app, run
from longseq_bench.config.loader import load_config
from longseq_bench.config.trials import make_sweep
from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry
from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.store import RECORDS, load
from tests import make
from tests.cli.commands import Capture, document
from tests.make import record, step, trial
from tests.simulated import SimulatedLauncher

TINY = """\
memory_budget: 64MiB
workload: {heads: 2, head_dim: 32}
tokens: 64
baseline: sdpa
implementations:
  - sdpa
  - ring: {chunk: [32, 64]}
rounds: 2
repeats: 3
time_cap: 50ms
"""

ROW = (
    "implementation options source tokens world_size device dtype mode causal mask status reason "
    "phase time_s time_low_s time_high_s samples unstable plan_time_s peak_bytes "
    "tokens_per_s flops max_error density_asked "
    "density_achieved batch heads kv_heads head_dim v_head_dim model tokens_per_rank mask_density "
    "work_imbalance new_tokens bytes_to_read copy_bandwidth share_of_bandwidth compute_time_s "
    "communication_time_s exposed_share bytes_sent bytes_formula wire_error rank_times rank_peaks "
    "imbalance speedup efficiency effective_flops matmul_rate share_of_peak "
    "token_density uncovered dense_time_s dense_low_s dense_high_s dense_source dense_kernel "
    "speed_over_dense share_of_ideal share_low share_high dense_flops dense_peak_bytes "
    "dense_memory_source memory_reduction keep allocator alloc_retries requested_dense_kernel "
    "outside_allocator_bytes timing check_limits"
)
"""Names of the JSON of a row: a contract."""
RESULT = (
    "implementation options device dtype mode max_tokens first_failure limited_by failure_phase "
    "floor_tokens fraction_of_floor peak_bytes bytes_per_token predicted_tokens runs "
    "confirmations wall_s world_size tokens_per_rank rank_peaks imbalance fits_tokens keep "
    "allocator alloc_retries outside_allocator_bytes requested_dense_kernel mask "
    "new_tokens check_limits wrong_tokens"
)
BUDGET_8MIB = ("--memory-budget", "8MiB", "--heads", "8", "--head-dim", "64", "--threads", "1")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- the program -------------------------------------------------------------------------------


def printed_to(stdout: int, *command: str) -> tuple[int, str]:
    """The exit code of a command over few records whose stdout is this file, and its stderr."""
    make.write_records(Path("kept"), [record(trial(round=i)) for i in range(2)])
    arguments = [sys.executable, "-m", "longseq_bench", *command]
    done = subprocess.run(arguments, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def test_a_closed_stdout_is_not_an_error() -> None:
    """`compare`, whose exit code is its answer, is in test_compare.py."""
    reader, writer = os.pipe()
    os.close(reader)
    assert printed_to(writer, "report", "kept", "--format", "terminal") == (0, "")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_stdout_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        code, message = printed_to(full.fileno(), "show", "kept", "--json")
    assert message == "longseq: the output can't be written: No space left on device\n"
    assert code == 2


def parameters(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every option and argument of a command and its subcommands, with where it is."""
    for one in command.params:
        yield " ".join([*path, *one.opts]), one
    for name, below in getattr(command, "commands", {}).items():
        yield from parameters(below, (*path, name))


def test_every_option_has_help_with_its_default() -> None:
    found = dict(parameters(get_command(app)))
    assert len(found) > 80
    assert [name for name, one in found.items() if not getattr(one, "help", None)] == []
    optional = {n: p for n, p in found.items() if p.param_type_name == "option" and not p.required}
    stated = {n: p.show_default or "efault" in (p.help or "") for n, p in optional.items()}
    assert [n for n, text in stated.items() if not text and n not in ("--version", "--help")] == []


# ---- list, doctor ------------------------------------------------------------------------------


def test_list_has_options_defaults_and_reasons(capfd: Capture) -> None:
    answer = document(capfd, "list")
    assert answer["schema"] == 1
    known = answer["implementations"]
    built_in = {name for name, entry in known.items() if entry["source"] == "built-in"}
    assert built_in >= {
        "dense", "sdpa", "ring", "collective", "dilated", "hilbert", "block-sparse",
    }  # fmt: skip
    chunk = next(o for o in known["ring"]["options"] if o["name"] == "chunk")
    assert (chunk["kind"], chunk["default"], chunk["optional"]) == ("int", None, True)
    assert chunk["help"]
    (odd,) = known["bad-refuses"]["options"]
    assert (odd["name"], odd["kind"], odd["help"]) == ("odd", "bool", "odd lengths too")
    assert known["bad-refuses"]["source"] == "misbehaving"
    assert "no_such_name" in known["bad-import"]["unavailable"]["cpu"]
    assert "cpu" not in known["sdpa"]["unavailable"]
    assert run(["list"]) == 0
    output = capfd.readouterr().out
    assert all(word in output for word in ("block-sparse", "chunk=", "no_such_name"))


def test_doctor_describes_this_machine(capfd: Capture) -> None:
    answer = document(capfd, "doctor")
    assert answer["schema"] == 1
    assert answer["environment"]["cores"] >= 1
    assert {"name", "state", "found", "remedy"} <= set(answer["findings"][0])
    assert run(["doctor"]) == 0
    assert answer["environment"]["host"] in capfd.readouterr().out


def test_doctor_fails_where_no_child_can_be_started(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def fail(self: LocalLauncher) -> Catalogue:
        raise LauncherError("a child process can't be started here: it printed nothing")

    monkeypatch.setattr(LocalLauncher, "catalogue", fail)
    assert run(["doctor"]) == 2
    assert "a child process can't be started here" in capfd.readouterr().err


# ---- sweep -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_prints_one_document_and_writes_its_records_and_reports(
    tiny: Path, tmp_path: Path, capfd: Capture
) -> None:
    assert run(["sweep", str(tiny), "--out", "out", "--json"]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert (set(answer), answer["schema"]) == ({"schema", "rows"}, 1)
    assert all(set(row) > set(ROW.split()) for row in answer["rows"])
    assert len(answer["rows"]) == 3
    assert [(r["implementation"], r["options"].get("chunk")) for r in answer["rows"]] == [
        ("sdpa", None), ("ring", 32), ("ring", 64),
    ]  # fmt: skip
    for row in answer["rows"]:
        assert (row["tokens"], row["status"], row["causal"]) == (64, "ok", False)
        assert 0 < row["time_low_s"] <= row["time_s"] <= row["time_high_s"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["time_s"])
        assert 0 < row["max_error"] < 1e-4
    assert files(tmp_path / "out") >= {RECORDS, "report.md", "report.csv", "config.yaml"}
    assert (tmp_path / "out" / "config.yaml").read_text() == TINY
    lines = captured.err.splitlines()
    assert lines[0].startswith(("device: cpu; dtype: float32", "device: cuda"))
    assert [line.split("  ")[0] for line in lines[1:7]] == [
        "[1/6] sdpa 64", "[2/6] ring 64 chunk 32", "[3/6] ring 64 chunk 64",
        "[4/6] sdpa 64", "[5/6] ring 64 chunk 32", "[6/6] ring 64 chunk 64",
    ]  # fmt: skip
    ran = [(r.trial.round, r.trial.implementation) for r in load(tmp_path / "out").records]
    assert ran == [(turn, name) for turn in (0, 1) for name in ("sdpa", "ring", "ring")]

    kept = (tmp_path / "out" / RECORDS).read_bytes()
    assert document(capfd, "sweep", tiny, "--out", "out") == answer
    assert (tmp_path / "out" / RECORDS).read_bytes() == kept


def test_an_option_sets_the_timing_of_every_trial_of_a_sweep(tiny: Path, capfd: Capture) -> None:
    """It overrides the file, which is an axis of the grid."""
    for text, option, expected in (
        ("", ("--timing", "cold"), ["cold"] * 3),
        ("timing: [warm, cold]", ("--timing", "graph"), ["graph"] * 3),
        ("timing: [warm, cold]", (), ["warm", "cold"] * 3),
    ):
        tiny.write_text(TINY + text)
        listed = document(capfd, "sweep", tiny, "--dry-run", *option)["trials"]
        assert sorted(one["timing"] for one in listed) == sorted(expected)


def test_a_sweep_without_a_file_is_a_grid_of_its_options(tmp_path: Path, capfd: Capture) -> None:
    """Its folder has the file, which makes the same trials."""
    command = (
        "sweep", "--tokens", "64,128", "--impl", "block-sparse", "--impl", "dilated", "--heads", 2,
        "-o", "sparsity=0.5,0.75", "-o", "block=16", "-o", "segments=32,64", "-o", "dilation=1,2",
        "--memory-budget", "32MiB,64MiB", "--rounds", 1, "--repeats", 1,
    )  # fmt: skip
    answer = document(capfd, *command, "--out", "out")
    names = {(r["implementation"], r["memory_budget"], r["tokens"]) for r in answer["rows"]}
    assert len(names) == 2 * 2 * 2
    listed = document(capfd, *command, "--dry-run")["trials"]
    assert document(capfd, "sweep", "out/config.yaml", "--dry-run")["trials"] == listed
    options = [(t["options"].get("sparsity"), t["options"].get("segments")) for t in listed]
    assert {*map(str, options)} == {"(0.5, None)", "(0.75, None)", "(None, [32, 64])"}
    assert len(listed) == 3 * 2 * 2


def test_a_recommendation_is_said_again_by_a_second_call_and_by_the_report(capfd: Capture) -> None:
    """The pass that would take too long is predicted; a sweep with the folder's config runs it."""
    command = (
        "recommend", "--tokens", "128,256", "--impl", "ring", "--impl", "block-sparse", "--heads",
        "1", "-o", "sparsity=0.5", "-o", "block=32", "--memory-budget", "16MiB", "--out", "out",
        "--within", "1ms",
    )  # fmt: skip
    assert run([*command]) == 0
    first = capfd.readouterr()
    assert [line[:3] for line in first.err.splitlines() if "] " in line] == ["[1]", "[2]"]
    answer = " ".join(first.out.split())
    assert re.search(r"At 256 tokens: [^:]*~", answer)
    assert run([*command, "--json"]) == 0
    again = capfd.readouterr()
    assert again.err.count("(from an earlier run)") == 2
    lines = json.loads(again.out)["answers"]
    assert {line["256"][0] for line in lines} == {"~"}
    assert run(["report", "out", "--format", "terminal"]) == 0
    figures = answer[answer.index("At 128 ") : answer.index(" Time of a pass")]
    assert figures in " ".join(capfd.readouterr().out.split())
    rows = document(capfd, "sweep", "out/config.yaml", "--out", "out")["rows"]
    assert {(row["tokens"], row["status"]) for row in rows} == {(128, "ok"), (256, "ok")}


def test_a_recommendation_of_nothing_says_so(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [
        make.record(make.trial("ring", 2048), make.measured(0.1)),
        make.record(make.trial("ring", 8192), make.outcome("wrong", "bad", "check")),
    ]
    place = "longseq_bench.api.recommendation.recommend"
    monkeypatch.setattr(place, lambda *_, **given: Results(records))
    assert run(["recommend", "--tokens", "2k,8k,16k"]) == 3
    said = capfd.readouterr()
    assert said.err == "no implementation passed at 8k or 16k tokens\n"
    assert "ring at 8k: wrong in check: bad" in said.out


def test_the_usual_implementations_can_run(launcher: LocalLauncher) -> None:
    grid = {"tokens": "8k", "implementations": USUAL, "memory_budget": "1GiB"}
    trials = make_sweep(_parse(None, grid, 1, None), launcher.catalogue()).trials
    launcher.check(trials)
    reasons = {one.unsupported for one in launcher.dry_run(trials)}
    assert (len(trials), reasons) == (7, {None})


@pytest.mark.usefixtures("simulated")
def test_a_sweep_goes_by_default_to_a_new_folder_under_results(
    tmp_path: Path, capfd: Capture
) -> None:
    (tmp_path / "one.yaml").write_text("tokens: 64\nimplementations: ring\nmemory_budget: 64MiB\n")
    assert run(["sweep", "one.yaml"]) == 0
    (folder,) = (tmp_path / "results").iterdir()
    assert {RECORDS, "report.md", "report.csv"} <= files(folder)
    assert f"wrote results/{folder.name}/report.md" in capfd.readouterr().err


@pytest.mark.parametrize(("busy", "is_busy"), [(999, True), (0, False)])
def test_the_first_line_says_that_other_work_runs(
    tiny: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, busy: int, is_busy: bool
) -> None:
    monkeypatch.setattr(machine.environment, "busy_elsewhere", lambda: busy)
    assert run(["sweep", str(tiny), "--dry-run"]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert ("BUSY: 999 other threads run on" in printed) == is_busy


def test_a_dry_run_lists_the_trials_and_writes_nothing(
    tiny: Path, tmp_path: Path, capfd: Capture
) -> None:
    answer = document(capfd, "sweep", tiny, "--dry-run", "--out", "out")
    listed = [(t["implementation"], t["options"].get("chunk")) for t in answer["trials"]]
    assert listed == [("sdpa", None), ("ring", 32), ("ring", 64)]
    assert run(["sweep", str(tiny), "--dry-run"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("device: cpu; dtype: float32")
    assert "3 trials × 2 rounds; nothing was run" in printed
    estimate = answer["estimate"]
    assert (estimate["runs"], estimate["unknown_trials"]) == (6, 0)
    assert estimate["seconds"] > 0
    assert estimate["peak_bytes"] > 0
    assert printed.splitlines()[-1] == estimate["text"]
    assert re.fullmatch(r"6 runs, about \d+ s, at most [\d.]+ [KM]iB", estimate["text"])
    assert run(["sweep", str(tiny), "--dry-run", "--rounds", "1"]) == 0
    assert "3 trials × 1 round; nothing was run" in capfd.readouterr().out
    assert files(tmp_path) == {"tiny.yaml"}
    assert not (tmp_path / "out").exists()


def test_every_config_is_a_sweep(launcher: LocalLauncher) -> None:
    ranks = {}
    for config in (Path(__file__).parents[2] / "configs").iterdir():
        trials = make_sweep(load_config(config), launcher.catalogue()).trials
        launcher.check(trials)
        ranks[config.stem] = {trial.world_size for trial in trials}
    known = {"parallel": {1, 2}, "hilbert": {1, 2}, "ring-transports": {2}, "two-nodes": {16}}
    assert {name: worlds for name, worlds in ranks.items() if worlds != {1}} == known


# ---- maxlen ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_ends_with_the_bracket_of_its_records(tmp_path: Path, capfd: Capture) -> None:
    command = ("maxlen", "--impl", "sdpa", *BUDGET_8MIB, "--out", "out", "--json")
    answer = document(capfd, *command)
    assert (set(answer), answer["schema"]) == ({"schema", "results"}, 1)
    (found,) = answer["results"]
    assert set(found) >= set(RESULT.split())
    records = load(tmp_path / "out").records
    lengths = {r.trial.workload.seq_len: r.outcome.status for r in records}
    assert lengths[found["max_tokens"]] == "ok"
    assert lengths[found["first_failure"]] == "oom"
    passed = [n for n, status in lengths.items() if status == "ok"]
    assert found["max_tokens"] == max(passed) < found["first_failure"]
    assert found["first_failure"] - found["max_tokens"] <= max(64, found["max_tokens"] // 100)
    assert (found["limited_by"], found["device"], found["mode"]) == ("memory", "cpu", "forward")
    assert found["failure_phase"] in ("inputs", "forward")
    assert found["floor_tokens"] == 1024
    assert found["fraction_of_floor"] == pytest.approx(found["max_tokens"] / 1024)
    assert 0 < found["peak_bytes"] <= 8 * 2**20
    assert found["bytes_per_token"] == pytest.approx(found["peak_bytes"] / found["max_tokens"])
    assert found["runs"] == sum(r.processes for r in records)
    assert found["confirmations"] >= 1
    assert {RECORDS, "report.md", "report.csv"} <= files(tmp_path / "out")

    kept = (tmp_path / "out" / RECORDS).read_bytes()
    assert document(capfd, *command) == answer
    assert (tmp_path / "out" / RECORDS).read_bytes() == kept


class Ranks(SimulatedLauncher):
    """SimulatedLauncher, with an implementation and as many devices as a test likes."""

    count = 2
    dtypes: tuple[str, ...] = ("float32",)

    def catalogue(self, own: Any = ()) -> Catalogue:
        known = DeviceInfo(name="simulated", dtypes=self.dtypes, count=self.count)
        return Catalogue(
            implementations={"ring": Entry(summary="")}, devices={"cpu": known, "cuda": known}
        )


@pytest.mark.slow
def test_a_search_with_a_wrong_output_ends_with_3(capfd: Capture) -> None:
    command = ["maxlen", "--impl", "bad-over-heads", "--memory-budget", "8MiB", "--ceiling", "8"]
    (found,) = document(capfd, *command, code=3)["results"]
    assert (found["limited_by"], found["failure_phase"]) == ("numerics", "check")
    assert found["wrong_tokens"] == found["first_failure"]
    assert found["runs"] == 4  # two lengths, each also with more memory


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run no process: outcomes come by formula."""
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Ranks)


class OneGpu(Ranks):
    """A machine with one GPU."""

    count = 1
    dtypes = ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("more", "device", "dtype"),
    [
        ([], "cuda", "bfloat16"),
        (["--dtype", "fp32"], "cuda", "float32"),
        (["--world-size", "2"], "cpu", "float32"),
        (["--device", "cpu"], "cpu", "float32"),
    ],
)
def test_the_default_device_is_cuda_where_it_works_and_the_first_line_says_so(
    more: list[str], device: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", OneGpu)
    command = ["maxlen", "--impl", "ring", "--memory-budget", "8MiB", "--ceiling", "64"]
    assert run([*command, *more, "--out", "out"]) == 0
    trials = [record.trial for record in load("out").records]
    assert {(trial.device, trial.workload.dtype) for trial in trials} == {(device, dtype)}
    first = capfd.readouterr().err.splitlines()[0]
    name = "cuda (simulated)" if device == "cuda" else "cpu"
    reason = "" if device == "cuda" or "--device" in more else "; no cuda for 2 ranks: 1 GPU(s)"
    assert first.startswith(f"device: {name}; dtype: {dtype}{reason}")
    assert bool(reason) == ("can't share" in first)


@pytest.mark.usefixtures("simulated")
def test_ranks_share_the_free_memory_of_a_cpu_and_not_of_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "free_memory", lambda *_: 10 * 2**30)
    command = ["maxlen", "--impl", "ring", "--ceiling", "64", "--json"]

    def budget(out: str, *more: str, device: str = "cpu") -> int | None:
        assert run([*command, "--out", out, "--device", device, *more]) == 0
        return load(tmp_path / out).records[-1].trial.memory_budget

    assert budget("one") == 8 * 2**30
    assert budget("two", "--world-size", "2") == 4 * 2**30
    assert budget("gpus", "--world-size", "2", device="cuda") == 8 * 2**30
    # going on where it stopped asks for the same, whatever is free now
    monkeypatch.setattr(environment, "free_memory", lambda *_: 5 * 2**30)
    assert budget("two", "--world-size", "2") == 4 * 2**30


def test_options_reach_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", OneGpu)
    line = (
        "maxlen --impl ring --causal --mode train --dtype bfloat16 --heads 4 --kv-heads 2 "
        "--head-dim 16 --batch 2 --seed 7 --memory-budget 16MiB --time-budget 1min --ceiling 32 "
        "--threads 1 --device cpu --out out"
    )
    answer = document(capfd, *line.split())
    assert (answer["results"][0]["mode"], answer["results"][0]["dtype"]) == ("train", "bfloat16")
    ran = load(tmp_path / "out").records[0].trial
    w = ran.workload
    assert (w.causal, w.mode, w.dtype, w.batch) == (True, "train", "bfloat16", 2)
    assert (w.heads, w.kv_heads, w.head_dim, w.seq_len) == (4, 2, 16, 32)
    assert (ran.memory_budget, ran.time_budget) == (16 * 2**20, 60.0)
    assert (ran.seed, ran.threads, ran.device) == (7, 1, "cpu")


# ---- report ------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with a sweep of two lengths and a search, made by hand."""
    base = trial("ring", options={"chunk": 64}, memory_budget=64 * 2**20, repeats=0)
    kept = [
        *(record(trial(name, n)) for n in (1024, 2048) for name in ("sdpa", "dense")),
        step(1000, of=base),
        step(1064, "oom", "edge", of=base),
        step(1000, purpose="confirm", of=base.replace(round=1)),
    ]
    return make.write_records(tmp_path / "kept", kept)


def test_a_report_is_written_next_to_the_records(results: Path, capfd: Capture) -> None:
    assert run(["report", str(results)]) == 0
    assert {RECORDS, "report.md", "report.csv", "report-charts/01-time.svg"} < files(results)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert f"wrote {results / 'report.md'}" in captured.err.replace("\n", "")
    assert "dense" in (results / "report.md").read_text()
    assert "1,064" in (results / "report-details.md").read_text()


def test_a_report_shows_every_config_next_to_records(results: Path, tmp_path: Path) -> None:
    """However far down; one beside no records belongs to nothing here."""
    for place in ("one", "a/b/two", "none"):
        (tmp_path / "all" / place).mkdir(parents=True)
        (tmp_path / "all" / place / "config.yaml").write_text(f"tokens: {place}\n")
    for place in ("one", "a/b/two"):
        (tmp_path / "all" / place / RECORDS).write_bytes((results / RECORDS).read_bytes())
    assert run(["report", str(tmp_path / "all"), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report-details.md").read_text()
    shown = [line for line in text.splitlines() if line.startswith("## Config: ")]
    folders = (tmp_path / "all" / "a/b/two", tmp_path / "all" / "one")
    assert shown == [f"## Config: {folder}/config.yaml" for folder in folders]


def test_duplicate_records_are_read_once(results: Path, tmp_path: Path, capfd: Capture) -> None:
    """A file and its folder, a link to it, and a copy of it whose records are the same runs."""
    (tmp_path / "link").symlink_to(results)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / RECORDS).write_bytes((results / RECORDS).read_bytes())
    alone = document(capfd, "show", results / RECORDS)
    again = (results, results / RECORDS, tmp_path / "link")
    assert document(capfd, "show", *again) == alone
    assert run(["show", str(results), str(copy), "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == alone
    assert "duplicate records ignored: " in captured.err
