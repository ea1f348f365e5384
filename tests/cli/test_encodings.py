"""Text that an encoding or a record can't hold: never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.cli.session import ConsoleReporter
from longseq_bench.store import load
from tests import make
from tests.cli.commands import Capture


def test_a_command_with_a_name_that_is_not_utf8_fits_in_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["longseq", "sweep", "a\udcff.yaml"])
    command = ConsoleReporter().command
    assert command == "longseq sweep 'a\\udcff.yaml'"
    assert make.record(command=command).model_dump_json()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_symbols_that_an_encoding_lacks_are_no_traceback(encoding: str) -> None:
    make.write_records("records", [make.record()])
    done = subprocess.run(
        [sys.executable, "-m", "longseq_bench", "show", "records"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "120"}, capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert ("?" if encoding == "ascii" else "±") in done.stdout.decode(encoding)


FUNCTION = """\
from torch.nn.functional import scaled_dot_product_attention as sdpa

def named(q, k, v, *, name: str = "a"):
    return sdpa(q, k, v)

def half(q, k, v, *, name: str = "\\udcff"):
    return sdpa(q, k, v)

def fails(q, k, v):
    raise ValueError("no \\udcff " + 5_000 * "long ")
"""
SHORT_SEARCH = ["--memory-budget", "4MiB", "--heads", "1", "--ceiling", "64", "--out", "out"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--impl", "f\udcff.py:named"],
         "implementation 'f\\udcff.py:named' is not UTF-8, as records are; rename its file"),
        (["--impl", "f.py:named", "-o", "name=\udcff"],
         "option name='\\udcff' in f.py:named has half of a character (a surrogate), which no "
         "record can hold; remove it"),
        (["--impl", "f.py:half"],
         "option name='\\udcff' in f.py:half has half of a character (a surrogate), which no "
         "record can hold; remove it"),
    ],
)  # fmt: skip
def test_what_no_record_can_hold_is_refused_before_anything_runs(
    arguments: list[str], sentence: str, capfd: Capture
) -> None:
    for name in ("f.py", "f\udcff.py"):
        Path(name).write_text(FUNCTION)
    code = run(["maxlen", *arguments, *SHORT_SEARCH])
    assert (code, Path("out").exists()) == (2, False)
    assert capfd.readouterr().err.splitlines()[-1] == f"longseq: {sentence}"


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
