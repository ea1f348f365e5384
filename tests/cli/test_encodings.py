"""Text that an encoding or a record can't hold: never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.store import load
from tests import make


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

def fails(q, k, v):
    raise ValueError("no \\udcff " + 5_000 * "long ")
"""


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
