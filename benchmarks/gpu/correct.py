"""Step correct: every test that needs a GPU.

Those that compare results run side by side, the files of those that read clocks or memory alone.
"""

import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.items import ROOT, Item, Session, Step, plain_table
from benchmarks.gpu.processes import run_tests

MARKER = "mark.cuda"
DRY_RUN_FILES = ["tests/cuda/test_peak_meter.py"]
RESULTS_ONLY = ("tests/kernels/", "tests/cuda/test_triton_blocks.py")
MOST_WORKERS = 8
"""Each holds a context and some GiB."""


def list_items(session: Session) -> Sequence[Item]:
    """Return an item for the tests that run side by side, and one per other file."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [str(path.relative_to(ROOT)) for path in paths if MARKER in path.read_text("utf-8")]
    together = [name for name in names if name.startswith(RESULTS_ONLY)]
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    if session.dry_run:
        names, together, workers = DRY_RUN_FILES, DRY_RUN_FILES, 2
    if find_spec("xdist") is None:
        together = []
    alone = [name for name in names if name not in together]
    found = [make_item(session, name.removeprefix("tests/"), [name], 1, 40, 2) for name in alone]
    if together:
        found.insert(0, make_item(session, "side by side", together, workers, 150, 1))
    return found


def make_item(
    session: Session, name: str, files: list[str], workers: int, seconds: float, tier: int
) -> Item:
    """Return an item that runs the tests of files."""
    folder = session.out / "correct" / Path(name).stem.replace(" ", "_")
    return Item(name, partial(run_tests, files, workers, folder, session), seconds, tier)


STEP = Step("correct", list_items, plain_table)
