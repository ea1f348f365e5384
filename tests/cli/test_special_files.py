"""A FIFO or a device in the place of a file is refused at once; an open pipe with a config runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.core.errors import UserError
from longseq_bench.core.user_files import read_file
from longseq_bench.store import LOCK, RECORDS, TORN
from tests.cli.commands import Capture, refusal
from tests.make import record, write_records

CONFIG = "memory_budget: 64MiB\ntokens: [32, 64]\nimplementations: [sdpa]\n"
PLAN = ["plan", "--impl", "sdpa", "--gpu", "h100"]
NO_FILE = "not a regular file; write its content to a file and name that"

pytestmark = pytest.mark.timeout(240, method="signal")
"""A FIFO that is opened waits for its other end forever."""


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    os.mkfifo("fifo")
    Path("link").symlink_to("/dev/zero")
    write_records("kept", [record()])


@pytest.mark.parametrize(
    "command",
    [
        ["sweep", "FILE", "--dry-run"],
        ["sweep", "FILE", "--out", "out"],
        ["launch", "--", "sweep", "FILE", "--dry-run"],
        ["show", "FILE"],
        ["list", "--impl", "./FILE:f"],
        [*PLAN, "--model", "FILE"],
        [*PLAN, "--model", "./FILE"],
        [*PLAN, "--hardware", "FILE"],
    ],
    ids=" ".join,
)
def test_what_is_no_file_is_refused(command: list[str], capfd: Capture) -> None:
    for name, kind in (("fifo", "a FIFO"), ("link", "a character device, through a link to")):
        message = refusal(capfd, *(word.replace("FILE", name) for word in command))
        assert message.startswith(f"{name} is {kind}")
        assert NO_FILE in message or command[0] == "show"
    assert not Path("out").exists()


def test_a_file_that_is_replaced_before_it_is_opened_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = os.stat(__file__)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(os, "stat", lambda path, **options: found)
        with pytest.raises(UserError, match="fifo is a FIFO"):
            read_file(Path("fifo"), UserError)


def test_a_fifo_in_a_folder_of_a_model_is_refused(capfd: Capture) -> None:
    os.mkfifo("config.json")
    assert refusal(capfd, *PLAN, "--model", "../" + Path.cwd().name).endswith(NO_FILE)


@pytest.mark.parametrize("name", ["report.md", "config.yaml", RECORDS, TORN, LOCK])
def test_what_is_no_file_in_a_results_folder_is_refused(name: str, capfd: Capture) -> None:
    path = Path("kept") / name
    if name == TORN:
        with (Path("kept") / RECORDS).open("a") as stream:
            stream.write("{")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    Path("sound.yaml").write_text(CONFIG)
    assert run(["sweep", "sound.yaml", "--out", "kept"]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"longseq: {path} is a FIFO, and ")
    assert "remove it or name another folder" in last


def test_a_fifo_beside_the_records_stops_no_report(capfd: Capture) -> None:
    os.mkfifo("kept/config.yaml")
    assert run(["report", "kept", "--format", "md"]) == 0
    capfd.readouterr()
    Path("kept/report.md").unlink()
    os.mkfifo("kept/report.md")
    assert refusal(capfd, "report", "kept").startswith("kept/report.md is a FIFO, and a report is ")


def piped(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with a text on its stdin, which is a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "longseq_bench", *command],
        input=text, capture_output=True, encoding="utf-8", timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize("command", [["sweep"], ["launch", "--", "sweep"]], ids=" ".join)
@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_a_config_may_come_from_an_open_pipe(command: list[str], name: str) -> None:
    """As with `longseq sweep <(program)`; launch reads it three times."""
    done = piped([*command, name, "--dry-run"], CONFIG)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "2 trials" in done.stdout


def test_a_pipe_that_delivers_too_much_is_refused() -> None:
    done = piped(["sweep", "/dev/stdin"], "# no end\n" * 2_000_000)
    assert done.returncode == 2
    sentence = "/dev/stdin has more than 16 MiB, the most that is read; name another file"
    assert done.stderr == f"longseq: {sentence}\n"


def test_a_file_that_is_too_large_is_refused(capfd: Capture) -> None:
    with open("sparse", "wb") as stream:
        stream.truncate(1 << 40)
    assert "sparse has more than 16 MiB" in refusal(capfd, "sweep", "sparse")
    assert "sparse has more than 16 MiB" in refusal(capfd, *PLAN, "--model", "sparse")
    assert "sparse has more than 2 MiB" in refusal(capfd, *PLAN, "--hardware", "sparse")
