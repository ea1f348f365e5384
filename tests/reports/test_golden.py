"""Whole pages, as they were read and found right: golden/<stem>.md, one of each kind.

After a change of wording: `python -m tests.reports.test_golden` writes them anew; read the
difference before it is committed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from longseq_bench.reports import documents
from longseq_bench.reports.render import charts
from longseq_bench.reports.render.markdown import render
from tests.reports import made

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("extreme", "devices", "scaling", "capabilities", "implementations", "summary")


@cache
def pages() -> dict[str, str]:
    """Each report of one made set, by its file's name, with the words of pictures alone."""
    records = [*made.rich(), *made.sparser()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "svg", lambda chart: "")
        found = [render(document) for document in documents(records, KINDS, baseline="dense")]
    return {name: text for files in found for name, text in files.items() if name.endswith(".md")}


@pytest.mark.parametrize("name", sorted(pages()))
def test_a_page_reads_as_it_did(name: str) -> None:
    assert pages()[name] == (GOLDEN / name).read_text(encoding="utf-8")


def test_every_golden_page_is_of_a_report() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(pages())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in pages().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
