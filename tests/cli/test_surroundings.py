"""What a command meets: encodings, pipes, files that are too large or damaged, little memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.store import RECORDS, load
from tests.cli.commands import Capture, refusal
from tests.make import record, trial, write_records

CONFIG = "memory_budget: 64MiB\ntokens: [32, 64]\nimplementations: [sdpa]\n"
PLAN = ["plan", "--impl", "sdpa", "--gpu", "h100"]


def test_a_file_that_is_too_large_is_refused(capfd: Capture) -> None:
    with open("sparse", "wb") as stream:
        stream.truncate(1 << 40)
    assert "sparse has more than 256 KiB" in refusal(capfd, "sweep", "sparse")
    assert "sparse has more than 16 MiB" in refusal(capfd, *PLAN, "--model", "sparse")
    assert "sparse has more than 16 MiB" in refusal(capfd, *PLAN, "--hardware", "sparse")


@pytest.mark.parametrize("command", ["show out", "report out", "compare out out"])
def test_a_command_that_reads_results_names_a_damaged_line(command: str, capfd: Capture) -> None:
    file = write_records("out", [record(), record(trial(seq_len=2048))]) / RECORDS
    file.write_text(file.read_text().replace("2048", "2047"))
    run(command.split())
    assert "line 2 is skipped (unchanged on disk): its checksum does" in (
        " ".join(capfd.readouterr().err.split())
    )


def test_symbols_that_an_encoding_lacks_are_no_traceback() -> None:
    write_records("records", [record()])
    done = subprocess.run(
        [sys.executable, "-m", "longseq_bench", "show", "records"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "120"}, capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert "?" in done.stdout.decode("ascii")


FAILS = """\
def fails(q, k, v):
    raise ValueError("no \\udcff " + 5_000 * "long ")
"""


def test_an_error_may_have_any_text() -> None:
    """A lone surrogate ended the whole sweep; a text of 10 MB made a line of 10 MB."""
    Path("f.py").write_text(FAILS)
    Path("a.yaml").write_text(
        "tokens: 64\nimplementations: ['f.py:fails', sdpa]\nrounds: 1\nrepeats: 1\n"
    )
    assert run(["sweep", "a.yaml", "--out", "out"]) == 3
    failed, other = load("out").records
    assert (failed.outcome.status, other.outcome.status) == ("error", "ok")
    assert failed.outcome.reason.startswith("ValueError: no ? long")
    assert len(failed.model_dump_json()) < 10_000


def test_a_report_is_written_without_charts_where_none_can_be_drawn() -> None:
    """The library that draws them would end the process (SIGTRAP)."""
    write_records("kept", [record(trial(name)) for name in ("sdpa", "dense")])
    command = f"{sys.executable} -m longseq_bench report kept --format md --out out"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 6000000; {command}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    note = "The charts are left out: vl-convert-python needs 65 GiB of address space"
    assert done.stderr.splitlines()[-1].startswith(note)
    assert {path.name for path in Path("out").iterdir()} == {"report.md", "report-details.md"}
    report = Path("out/report.md").read_text()
    assert note in report
    assert "svg" not in report
