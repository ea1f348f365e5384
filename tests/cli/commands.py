"""Run a command and return what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.cli import run

Capture = pytest.CaptureFixture[str]


def document(capfd: Capture, *arguments: str | Path, code: int = 0) -> Any:
    """Return the one JSON document that a command prints with --json; nothing else is on stdout."""
    assert run([*map(str, arguments), "--json"]) == code
    return json.loads(capfd.readouterr().out)


def refusal(capfd: Capture, *arguments: str | Path) -> str:
    """Return the one-line error message of a command, without the program's name."""
    code = run([str(a) for a in arguments])
    printed = capfd.readouterr()
    assert (code, printed.out) == (2, "")
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("longseq: ")
    return line.removeprefix("longseq: ")
