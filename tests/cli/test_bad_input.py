"""Bad input: exit code 2, one clear sentence, nothing written, nothing lost."""

import json
from functools import partial
from pathlib import Path

import pytest

from longseq_bench import load as load_results
from longseq_bench.cli import run
from longseq_bench.store import RECORDS, load
from tests.cli.commands import Capture, document, refusal
from tests.cli.test_cli import Ranks
from tests.make import record, trial, write_records

TAIL = "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\nrounds: 1\nrepeats: 1\n"
SOUND = TAIL + "tokens: [32, 64]\nimplementations: [sdpa]\n"


@pytest.fixture(autouse=True)
def _sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sound config; wide lines."""
    monkeypatch.setenv("COLUMNS", "300")
    Path("sound.yaml").write_text(SOUND)


def state(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and what it holds."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# ---- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--impl", "spda"], "unknown implementation 'spda' in --impl; did you mean 'sdpa'?"),
        (["--impl", "flash_attn"],
         "'flash_attn' in --impl is a kernel, not an implementation; write fused with the option "
         "kernel=flash-attn-3 or kernel=flash-attn-4"),
        (["--impl", "sink_window"],
         "'sink_window' in --impl is a pattern; write block-sparse with the option "
         "pattern=sink-window"),
        (["--impl", "xformers"],
         "implementation 'xformers' in --impl is not included; the nearest one is 'sdpa', and "
         "a function of your own can call it (docs/getting-started.md)"),
        (["--impl", "ring", "--mode", "decode", "--keep", "nothing"],
         "keep=nothing has no meaning with mode=decode: the cache stays as it is"),
         (["--impl", "ring", "--keep", "inputs"],
          "keep=inputs needs mode=train: a forward pass keeps nothing for a backward"),
        (["--impl", "ring", "-o", "chunk"], "option 'chunk' can't be read; write chunk=VALUE"),
        (["--impl", "ring", "-o", "chunk=1k", "-o", "chunk=2k"],
         "option chunk is given twice, as '1k' and '2k'"),
        (["--impl", "sdpa", "--ceiling", "12q"],
         "--ceiling '12q' can't be read; write 4096, 4k or 1M"),
        (["--impl", "ring", "--world-size", "4", "--ceiling", "3"],
         "--ceiling 3 is smaller than --world-size 4; use at least 4"),
    ],
)  # fmt: skip
def test_an_impossible_search_is_refused(
    arguments: list[str], sentence: str, tmp_path: Path, capfd: Capture
) -> None:
    before = state(tmp_path)
    assert refusal(capfd, "maxlen", *arguments, "--out", "out") == sentence
    assert state(tmp_path) == before
    assert not Path("out").exists()


def test_more_ranks_than_cuda_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Ranks)
    command = ["maxlen", "--impl", "ring", "--memory-budget", "1MiB", "--ceiling", "16"]
    message = refusal(capfd, *command, "--device", "cuda", "--world-size", "4", "--out", "out")
    devices = "2 CUDA devices, and two ranks can't share one"
    assert message == f"--world-size 4 is too large: this machine has {devices}"
    assert not Path("out").exists()
    assert run([*command, "--device", "cuda", "--world-size", "2"]) == 0
    assert run([*command, "--world-size", "9"]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["swep", "sound.yaml"], "Did you mean 'sweep'?"),
        (["maxlen"], "Missing option '--impl'"),
        (["sweep", "sound.yaml", "--tokens", "1k"], "a sweep file and tokens exclude each other"),
        (["sweep", "--impl", "ring"], "tokens is missing; give it, or the path of a sweep file"),
        (
            ["sweep", "--impl", "ring", "--tokens", "1k", "-o", "sparsity=0.9"],
            "unknown option 'sparsity' in ring; known: chunk,",
        ),
        (
            ["sweep", "--impl", "block-sparse", "--tokens", "1k", "-o", "sparsity=0.9,x"],
            "option sparsity='x' in block-sparse is not a number",
        ),
        (
            ["sweep", "sound.yaml", "--profile", "none/x.gz"],
            "none/x.gz can't be used: No such file",
        ),
        (["sweep", "sound.yaml", "--profile", "sound.yaml"], "sound.yaml can't be used: File exis"),
        (["sweep", "sound.yaml", "--drty-run"], "--dry-run"),
        (["maxlen", "--impl", "sdpa", "--dtype", "float64"], "not one of 'float32', 'bfloat16'"),
    ],
)
def test_usage_errors_name_the_possible_values(
    arguments: list[str], sentence: str, tmp_path: Path, capfd: Capture
) -> None:
    before = state(tmp_path)
    assert run(arguments) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert sentence in printed.err.strip().splitlines()[-1]
    assert state(tmp_path) == before


def test_a_time_budget_shorter_than_one_run_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    slow = partial(Ranks, seconds=lambda trial: 1.0)
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", slow)
    command = ["maxlen", "--impl", "ring", "--time-budget", "1us", "--memory-budget", "8MiB"]
    assert run([*command, "--ceiling", "64", "--out", "out", "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.err.strip().splitlines()[-1] == (
        "longseq: time_budget 1e-06 s is shorter than any run; raise it"
    )
    (found,) = json.loads(captured.out)["results"]
    assert (found["max_tokens"], found["limited_by"]) == (0, "time")
    assert {r.outcome.status for r in load("out").records} == {"timeout"}


# ---- the config --------------------------------------------------------------------------------


def test_a_bad_config_is_refused_with_its_line_before_processes_start(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("longseq_bench.api.machine.make_launcher")
    Path("bad.yaml").write_text(SOUND + "memory_budjet: 1GiB\n")
    before = state(tmp_path)
    sentence = "bad.yaml:7: unknown key 'memory_budjet'; did you mean 'memory_budget'?"
    assert refusal(capfd, "sweep", "bad.yaml", "--out", "out") == sentence
    assert refusal(capfd, "sweep", "bad.yaml", "--dry-run") == sentence
    assert state(tmp_path) == before
    assert not Path("out").exists()


def test_an_ambiguous_baseline_is_refused_before_anything_runs(capfd: Capture) -> None:
    Path("bad.yaml").write_text(
        TAIL + "tokens: 32\nbaseline: ring\nimplementations:\n  - ring: {chunk: [16, 32]}\n"
    )
    message = refusal(capfd, "sweep", "bad.yaml", "--out", "out")
    assert "baseline 'ring' is ambiguous: 'ring chunk 16', 'ring chunk 32'" in message
    assert not Path("out").exists()


# ---- the results -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [RECORDS, "config.yaml"])
def test_a_folder_in_the_place_of_a_file_is_refused(name: str, capfd: Capture) -> None:
    (Path("out") / name).mkdir(parents=True)
    message = refusal(capfd, "sweep", "sound.yaml", "--out", "out")
    assert "Is a directory" in message
    assert f"out/{name}" in message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "it is empty"),
        (b"{}\n{}\n", "2 lines (1, 2) are skipped (unchanged on disk): not a record: trial: "),
    ],
)
def test_results_without_a_record_are_refused_by_report_and_filled_by_sweep(
    text: bytes, why: str, capfd: Capture
) -> None:
    Path("out").mkdir()
    path = Path("out") / RECORDS
    path.write_bytes(text)
    assert refusal(capfd, "report", "out").startswith(
        f"results out/{RECORDS} hold no record: {why}"
    )
    assert state(Path("out")) == {RECORDS: text}
    assert run(["sweep", "sound.yaml", "--out", "out"]) == 0
    assert path.read_bytes().startswith(text)
    assert [r.trial.workload.seq_len for r in load("out").records] == [32, 64]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["kepd"], "results kepd do not exist; did you mean kept?"),
        (["bare"], f"results folder bare holds no {RECORDS}"),
        (["kept", "--format", "md,cvs"], "unknown report format 'cvs'; did you mean 'csv'?"),
        (["kept", "--format", ""], "--format is empty; give it a value, or leave it out"),
        (["kept", "--kind", "sumary"], "unknown report kind 'sumary'; did you mean 'summary'?"),
        (
            ["kept", "--baseline", "dens"],
            "unknown baseline 'dens' in the results; did you mean 'dense'?",
        ),
        (["kept", "--out", "sound.yaml"], "report folder sound.yaml can't be written: File exists"),
    ],
)
def test_an_impossible_report_is_refused(
    arguments: list[str], sentence: str, tmp_path: Path, capfd: Capture
) -> None:
    Path("bare").mkdir()
    write_records("kept", [record(trial(name)) for name in ("sdpa", "dense")])
    before = state(tmp_path)
    assert sentence in refusal(capfd, "report", *arguments)
    assert state(tmp_path) == before


@pytest.mark.parametrize(
    ("config", "baseline"),
    [
        ("baseline: dense", "dense"),
        ("baseline:", None),
        ("baseline: ring", None),
        ("baseline: dense\ntokens: [", None),
        (f"tokens: {[1] * 800_001}\nbaseline: dense", None),
    ],
)
def test_the_baseline_of_a_config_is_one_that_has_records(
    config: str, baseline: str | None
) -> None:
    write_records("kept", [record(trial("sdpa")), record(trial("dense"))])
    (Path("kept") / "config.yaml").write_text(config)
    assert load_results("kept").baseline == baseline


# ---- trials that ended badly -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ({"bad-kills-itself": ("crashed", "forward", "killed by SIGKILL"),
          "bad-over-heads": ("wrong", "check", "off the float64 reference"),
          "bad-shape": ("error", "forward", "shapes cannot be multiplied")}, 3),
        ({"bad-limit": ("limit", "forward", "grid of 70000 blocks exceeds 65535"),
          "bad-import": ("unsupported", "start", "no_such_name")}, 0),
    ],
)  # fmt: skip
def test_failed_trials_have_their_reason_and_exit_code(
    failures: dict[str, tuple[str, str, str]], code: int, capfd: Capture
) -> None:
    Path("bad.yaml").write_text(TAIL + f"tokens: 2k\nimplementations: {[*failures, 'sdpa']}\n")
    *failed, sound = document(capfd, "sweep", "bad.yaml", "--out", "out", code=code)["rows"]
    report = (Path("out") / "report.md").read_text()
    assert [row["implementation"] for row in failed] == [*failures]
    for row, (status, phase, message) in zip(failed, failures.values(), strict=True):
        assert (row["status"], row["phase"]) == (status, phase)
        assert message in row["reason"]
        assert (row["time_s"], row["tokens_per_s"]) == (None, None)
        assert row["implementation"] in report
        assert status in report
    assert sound["status"] == "ok"


@pytest.mark.parametrize(
    "command",
    [
        ["maxlen", "--impl", "ring", "--ceiling", ""], ["plan", "--impl", "ring", "--model", ""],
        ["launch", "--", "maxlen", "--impl", "ring", "--ceiling", ""],
        ["sweep", "--memory-budget="],
    ],
)  # fmt: skip
def test_an_empty_value_is_refused(command: list[str], capfd: Capture) -> None:
    """As by a shell variable that is not set; a search without its ceiling would take long."""
    assert run(command) == 2
    name = next(word for word in reversed(command) if word).rstrip("=")
    assert f"longseq: {name} is empty; give it a value, or leave it out" in capfd.readouterr().err
