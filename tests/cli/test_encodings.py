"""Output in encodings that lack the symbols of tables: ASCII symbols, never a traceback."""

import io
import sys

import pytest

from longseq_bench.cli import run
from longseq_bench.cli.session import ConsoleReporter
from tests import make

COMMANDS = (
    ["show", "records"],
    ["report", "records", "--format", "terminal"],
    ["--help"],
    ["sweep", "--help"],
    ["show", "records", "--where", "é=×"],
    ["show", "\udcff…\x1b[2J"],
)


def printed(command: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return the exit code of a command, and what both streams got in an encoding."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    code = run(command)
    for stream in streams:
        assert stream.errors == "strict"
        stream.flush()
    raw = b"".join(s.buffer.getvalue() for s in streams)  # type: ignore[attr-defined]
    return code, raw.decode(encoding)


def test_a_command_with_a_name_that_is_not_utf8_fits_in_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["longseq", "sweep", "a\udcff.yaml"])
    command = ConsoleReporter().command
    assert command == "longseq sweep 'a\\udcff.yaml'"
    assert make.record(command=command).model_dump_json()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_symbols_fall_back_to_ascii(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make.write_records("records", [make.record()])
    monkeypatch.setenv("COLUMNS", "200")
    for command in COMMANDS:
        code, text = printed(command, encoding, monkeypatch)
        assert code == (2 if command[-1] in ("é=×", "\udcff…\x1b[2J") else 0)
        assert "Traceback" not in text
        assert "\x1b" not in text
    _, text = printed(["show", "records"], encoding, monkeypatch)
    assert ("+/-" if encoding == "ascii" else "±") in text
