"""A config from an open pipe; files that are too large; results whose lines are damaged."""

import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.store import RECORDS
from tests.cli.commands import Capture, refusal
from tests.make import record, trial, write_records

CONFIG = "memory_budget: 64MiB\ntokens: [32, 64]\nimplementations: [sdpa]\n"
PLAN = ["plan", "--impl", "sdpa", "--gpu", "h100"]


def piped(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with a text on its stdin, which is a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "longseq_bench", *command],
        input=text, capture_output=True, encoding="utf-8", timeout=200,
    )  # fmt: skip


def test_a_config_may_come_from_an_open_pipe() -> None:
    """As with `longseq sweep <(program)`, which reads it more than once."""
    done = piped(["sweep", "/proc/self/fd/0", "--dry-run"], CONFIG)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "2 trials" in done.stdout


def test_a_pipe_that_delivers_too_much_is_refused() -> None:
    done = piped(["sweep", "/dev/stdin"], "# no end\n" * 2_000_000)
    assert done.returncode == 2
    sentence = "/dev/stdin has more than 256 KiB, the most that is read; name another file"
    assert done.stderr == f"longseq: {sentence}\n"


def test_a_file_that_is_too_large_is_refused(capfd: Capture) -> None:
    with open("sparse", "wb") as stream:
        stream.truncate(1 << 40)
    assert "sparse has more than 256 KiB" in refusal(capfd, "sweep", "sparse")
    assert "sparse has more than 16 MiB" in refusal(capfd, *PLAN, "--model", "sparse")
    assert "sparse has more than 2 MiB" in refusal(capfd, *PLAN, "--hardware", "sparse")


@pytest.mark.parametrize("command", ["report out", "show out", "compare out out"])
def test_a_command_that_reads_results_names_a_damaged_line(command: str, capfd: Capture) -> None:
    file = write_records("out", [record(), record(trial(seq_len=2048))]) / RECORDS
    file.write_text(file.read_text().replace("2048", "2047"))
    run(command.split())
    assert "line 2 is not a record and skipped (unchanged on disk); line 2: its checksum does" in (
        " ".join(capfd.readouterr().err.split())
    )


def test_verify_is_answered_with_what_names_broken_lines(capfd: Capture) -> None:
    assert "longseq show RESULTS" in refusal(capfd, "verify", Path("kept"))
