"""The first screen: how much it holds, and links from findings to their rows."""

import pytest

from longseq_bench.reports.base import FORMATS
from longseq_bench.reports.document import Column, Document, Finding, KeyFigure, Section, Table
from tests.reports.test_figures import EXAMPLES, REAL, reports

TEXT = "Exact: ring reaches 45k tokens."
DOCUMENT = Document(
    "summary",
    "How far",
    ["Test CPU."],
    [
        Section("Answer", points=[Finding(TEXT, "Longest lengths"), "Plain."]),
        Section("Longest lengths", tables=[Table("", (Column("a"),), (("1",),))]),
    ],
    figures=[KeyFigure("Longest", "45k tokens", "30 s limit"), KeyFigure("Ranks", "2")],
)


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_a_first_screen_has_five_figures_a_short_table_and_a_chart(name: str) -> None:
    for document in reports(name)[1]:
        first = document.sections[0]
        assert len(document.figures) <= 5
        assert len(first.charts) <= 1
        assert len(first.tables) <= 1
        assert sum(len(table.rows) for table in first.tables) <= 12
        for section in document.sections:
            assert len(section.points) <= 5
            assert all(chart.points for chart in section.charts)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("md", (
            "\n- Longest: **45k tokens**, 30 s limit\n- Ranks: **2**\n",
            f"- {TEXT} ([rows](#longest-lengths))\n",
        )),
        ("html", (
            '<div><dt>Longest</dt><dd class="value">45k tokens</dd><dd>30 s limit</dd></div>',
            f'<li>{TEXT} <a href="#longest-lengths-rows">rows</a></li>',
            '<span id="longest-lengths-rows"></span>',
        )),
    ],
)  # fmt: skip
def test_files_have_figures_and_links(name: str, parts: tuple[str, ...]) -> None:
    (text,) = FORMATS.get(name)(DOCUMENT).values()
    for part in (*parts, "Plain."):
        assert part in text
