"""Output in encodings that lack the symbols of tables: ASCII symbols, never a traceback."""

import io
import json
import sys
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.cli.session import ConsoleReporter
from longseq_bench.store import load
from tests import make
from tests.cli.commands import Capture

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


FUNCTION = """\
from torch.nn.functional import scaled_dot_product_attention as sdpa

def named(q, k, v, *, name: str = "a"):
    return sdpa(q, k, v)

def fails(q, k, v):
    raise ValueError("no \\udcff " + 5_000 * "long ")
"""
SHORT_SEARCH = ["--memory-budget", "4MiB", "--heads", "1", "--ceiling", "64", "--out", "out"]


def test_an_option_that_no_record_can_hold_is_refused(capfd: Capture) -> None:
    Path("f.py").write_text(FUNCTION)
    assert run(["maxlen", "--impl", "f.py:named", "-o", "name=\udcff", *SHORT_SEARCH]) == 2
    assert not Path("out").exists()
    assert capfd.readouterr().err.splitlines()[-1] == (
        "longseq: option name='\\udcff' in f.py:named has half of a character (a surrogate), which "
        "no record can hold; remove it"
    )


def test_a_model_of_a_folder_whose_name_is_not_utf8_has_a_label_that_fits_in_a_record() -> None:
    Path("m\udcff").mkdir()
    shape = {"num_attention_heads": 1, "hidden_size": 16, "num_hidden_layers": 1}
    Path("m\udcff/config.json").write_text(json.dumps(shape))
    model = ["--model", "m\udcff", "--dtype", "float32"]
    assert run(["maxlen", "--impl", "sdpa", *model, *SHORT_SEARCH]) == 0
    assert {r.trial.workload.model.split()[0] for r in load("out").records} == {"m\\udcff"}


def test_an_error_may_have_any_text() -> None:
    """A lone surrogate ended the whole sweep; a text of 10 MB made a line of 10 MB."""
    Path("f.py").write_text(FUNCTION)
    Path("a.yaml").write_text(
        "tokens: 64\nimplementations: ['f.py:fails', 'f.py:named']\nrounds: 1\nrepeats: 1\n"
    )
    assert run(["sweep", "a.yaml", "--out", "out"]) == 3
    failed, other = load("out").records
    assert (failed.outcome.status, other.outcome.status) == ("error", "ok")
    assert failed.outcome.reason.startswith("ValueError: no ? long")
    assert len(failed.model_dump_json()) < 10_000
