"""`longseq compare`: sides as a user names them, exit codes, files, and the JSON of programs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from longseq_bench.analysis.runs import per_iteration
from longseq_bench.cli import run
from longseq_bench.core.model import Record
from longseq_bench.store import load
from tests import make
from tests.cli.commands import Capture, document
from tests.comparison import test_compare
from tests.comparison.test_compare import STEADY
from tests.make import write_records


@pytest.fixture(autouse=True)
def _results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name, by in (("old", 1.0), ("again", 1.001), ("slow", 1.1)):
        write_records(name, [r for n in (64, 128) for r in rounds(by, seq_len=n)])


def rounds(
    by: float = 1.0, commit: str = "abc1234", times: Sequence[float] = STEADY, **fields: Any
) -> list[Record]:
    where = make.environment(commit=commit)
    return test_compare.rounds(times=[by * t for t in times], where=where, **fields)


def compare(capfd: Capture, *arguments: str, code: int = 0) -> str:
    assert run(["compare", *arguments]) == code
    output = capfd.readouterr()
    return " ".join((output.out if code in (0, 4, 5) else output.err).split())


# ---- what it says and how it ends --------------------------------------------------------------


@pytest.mark.parametrize(
    ("sides", "options", "code", "first"),
    [
        (("old", "slow"), ("--fail-on", "5%"), 4, "FAIL: ulysses at 64 is 10 % slower"),
        (("old", "slow"), (), 0, "FAIL: ulysses at 64 is 10 % slower"),
        (("old", "slow"), ("--fail-on", "20%"), 0, "PASS: "),
        (("slow", "old"), ("--fail-on", "0.05"), 0, "PASS: "),
        (("old", "again"), ("--fail-on", "5%"), 0, "PASS: nothing is worse by 5 % or more in 2 tr"),
        (("loud", "loud"), ("--fail-on", "5%"), 5, "TOO NOISY: 1 of 1 trial could not have shown"),
        (("loud", "loud"), ("--fail-on", "5%", "--inconclusive", "warn"), 0, "TOO NOISY: "),
        (("loud", "loud"), (), 0, "TOO NOISY: "),
        (("loud", "loud"), ("--inconclusive", "fail"), 5, "TOO NOISY: "),
    ],
)
def test_the_first_line_is_the_verdict_and_decides_the_exit_code(
    sides: tuple[str, str], options: tuple[str, ...], code: int, first: str, capfd: Capture
) -> None:
    write_records("loud", rounds(times=(0.1, 0.105, 0.095)))
    assert run(["compare", *sides, *options]) == code
    printed = capfd.readouterr()
    assert printed.out.startswith(first)
    is_warned = "warning: TOO NOISY: " in printed.err
    assert is_warned == ("warn" in options and first.startswith("TOO NOISY"))
    found = document(capfd, "compare", *sides, *options, code=code)
    assert f"{found['verdict']}: {found['reason']}".startswith(first)
    is_computed = first.startswith("TOO NOISY") and "--fail-on" in options
    assert (found["rounds_enough"] or 0) > 3 or not is_computed


def test_the_exit_code_stays_without_a_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "longseq_bench", "compare", "old", "slow", "--fail-on", "5%"]
    assert subprocess.run(command, stdout=writer, check=False).returncode == 4
    os.close(writer)


@pytest.mark.parametrize(
    ("option", "output"),
    [
        ("--fail-on=5", "'5' is not between"), ("--fail-on=-1%", "'-1%' is not"),
        ("--fail-on=much", "'much' is not a fraction; write 5% or 0.05"),
    ],
)  # fmt: skip
def test_an_ambiguous_fraction_is_refused(option: str, output: str, capfd: Capture) -> None:
    name = option.partition("=")[0]
    assert f"longseq: {name} {output}" in compare(capfd, "old", "slow", option, code=2)


# ---- --run ----


def test_run_measures_both_in_turn_and_compares_them(capfd: Capture) -> None:
    few = ("--tokens", "64", "--rounds", "3", "--time-cap", "10ms", "--threads", "1")
    found = document(capfd, "compare", "--run", "sdpa", "dense", *few, "--out", "kept")
    assert (found["a"], found["b"]) == ("sdpa", "dense")
    (row,) = found["times"]
    assert (row["label"], row["tokens"], row["threads"]) == ("sdpa → dense", 64, 1)
    kept = load(Path("kept")).records
    order = [(r.trial.implementation, r.trial.round) for r in kept]
    assert order == [(name, i) for i in range(3) for name in ("sdpa", "dense")]
    times = [median(per_iteration(r, "time")) for r in kept]
    ratios = [new / old for old, new in zip(times[::2], times[1::2], strict=True)]
    assert (row["a_rounds"], row["b_rounds"]) == ([1.0] * 3, pytest.approx(ratios))


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--run", "sdpa", "sdpa"), "sdpa and sdpa are the same; --run compares two implement"),
        (("old", "slow", "--tokens", "2k"), "--tokens needs --run"),
        (("old", "slow", "--head-dim", "32"), "--head-dim needs --run"),
    ],
)
def test_run_needs_two_implementations_and_its_options_need_it(
    arguments: tuple[str, ...], output: str, capfd: Capture
) -> None:
    assert f"longseq: {output}" in compare(capfd, *arguments, code=2)


def test_two_files_with_the_same_content_are_refused_before_a_run(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longseq_bench.api.grid.sweep", None)
    for name in ("one.py", "two.py"):
        Path(name).write_text("def attention(q, k, v):\n    return v\n")
    sides = ("one.py:attention", "two.py:attention")
    few = ("--tokens", "16", "--rounds", "2", "--time-cap", "10ms", "--threads", "1")
    said = compare(capfd, "--run", *sides, *few, code=2)
    assert "one.py:attention and two.py:attention are the same" in said


# ---- files and data ----------------------------------------------------------------------------


def test_files_are_written_to_the_requested_folder(capfd: Capture) -> None:
    command = ("--format", "md,json,csv", "--out", "made", "--fail-on", "5%")
    compare(capfd, "old", "slow", *command, code=4)
    assert {p.name for p in Path("made").iterdir() if p.is_file()} == {
        "compare.md", "compare.json", "compare.csv",
    }  # fmt: skip
    assert "ulysses at 64 is 10 % slower" in Path("made/compare.md").read_text()
    assert json.loads(Path("made/compare.json").read_text())["kind"] == "compare"
    before = {str(p) for p in Path().rglob("*")}
    assert "did you mean" in compare(capfd, "old", "slow", "--format", "mdd", "--out", "x", code=2)
    assert "--format" in compare(capfd, "old", "slow", "--out", "x", code=2)
    compare(capfd, "old", "slow")
    assert {str(p) for p in Path().rglob("*")} == before


def test_the_json_document(capfd: Capture) -> None:
    found = document(capfd, "compare", "old", "slow", "--fail-on", "5%", code=4)
    assert set(found) == {
        "schema", "verdict", "reason", "rounds_enough", "a", "b", "level", "least", "fail_on",
        "worse", "summary", "notes", "times", "peaks", "maxima", "turned", "failed_alike",
        "only_a", "only_b", "unlike_machines", "differences",
    }  # fmt: skip
    assert (found["a"], found["b"], found["fail_on"]) == ("old", "slow", 0.05)
    assert len(found["worse"]) == 2
    row = found["times"][0]
    assert {"implementation", "options", "tokens", "ratio", "low", "high", "p", "adjusted",
            "seen_from", "free", "verdict", "reason", "note", "a_s", "a_low_s",
            "a_high_s", "b_s", "a_rounds", "b_rounds"} <= set(row)  # fmt: skip
    assert row["ratio"] == pytest.approx(1.1)
    assert row["verdict"] == "slower"
    assert row["low"] < 1.1 < row["high"]
