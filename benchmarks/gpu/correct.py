"""Step correct: every test that needs a GPU, one item per file."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.items import ROOT, Item, Session, Step, plain_table
from benchmarks.gpu.processes import run_tests

MARKER = "mark.cuda"
DRY_RUN_FILE = "tests/cuda/test_peak_meter.py"


def test_files(session: Session) -> list[str]:
    """Return the files with tests for CUDA; in a dry run one, whose tests are skipped."""
    if session.dry_run:
        return [DRY_RUN_FILE]
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(p.relative_to(ROOT)) for p in paths if MARKER in p.read_text(encoding="utf-8")]


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per file."""
    return [
        Item(
            name.removeprefix("tests/"),
            partial(run_tests, [name], "cuda", session.out / "correct" / Path(name).stem, session),
        )
        for name in test_files(session)
    ]


STEP = Step("correct", list_items, plain_table)
