"""The first screen: how much it holds."""

import pytest

from longseq_bench.reports.base import FORMATS
from longseq_bench.reports.document import Column, Document, KeyFigure, Section, Table
from tests.reports.test_figures import EXAMPLES, REAL, reports

TEXT = "Exact: ring reaches 45k tokens."
DOCUMENT = Document(
    "summary",
    "How far",
    ["Test CPU."],
    [
        Section("Answer", points=[TEXT, "Plain."]),
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
        assert sum(len(table.rows) for table in first.tables) <= 8
        for section in document.sections:
            assert len(section.points) <= 5
            assert all(chart.points for chart in section.charts)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("md", (
            "\n- Longest: **45k tokens**, 30 s limit\n- Ranks: **2**\n",
            f"- {TEXT}\n",
        )),
        ("html", (
            '<div><dt>Longest</dt><dd class="value">45k tokens</dd><dd>30 s limit</dd></div>',
            f"<li>{TEXT}</li>",
        )),
    ],
)  # fmt: skip
def test_files_have_figures_and_sentences(name: str, parts: tuple[str, ...]) -> None:
    (text,) = FORMATS.get(name)(DOCUMENT).values()
    for part in (*parts, "Plain."):
        assert part in text
