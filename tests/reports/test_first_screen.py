"""Key figures, and links from findings to their rows, in every format."""

import io
import json

import pytest
from rich.console import Console

from longseq_bench.reports.base import FORMATS
from longseq_bench.reports.document import Column, Document, Finding, KeyFigure, Section, Table
from longseq_bench.reports.render.terminal import print_document

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


@pytest.mark.parametrize(
    ("name", "figure", "finding", "plain"),
    [
        (
            "md",
            "\n- Longest: **45k tokens**, 30 s limit\n- Ranks: **2**\n",
            f"- {TEXT} ([rows](#longest-lengths))\n",
            "- Plain.\n",
        ),
        (
            "html",
            '<div><dt>Longest</dt><dd class="value">45k tokens</dd><dd>30 s limit</dd></div>',
            f'<li>{TEXT} <a href="#longest-lengths-rows">rows</a></li>',
            "<li>Plain.</li>",
        ),
    ],
)
def test_files_have_figures_and_links(name: str, figure: str, finding: str, plain: str) -> None:
    (text,) = FORMATS.get(name)(DOCUMENT).values()
    assert figure in text
    assert finding in text
    assert plain in text


def test_a_link_leads_to_the_section_of_its_rows() -> None:
    (text,) = FORMATS.get("html")(DOCUMENT).values()
    assert '<section id="longest-lengths"' in text
    assert '<span id="longest-lengths-rows"></span>' in text


def test_json_has_the_figures() -> None:
    (text,) = FORMATS.get("json")(DOCUMENT).values()
    document = json.loads(text)
    first = {"label": "Longest", "value": "45k tokens", "words": "30 s limit"}
    assert document["figures"][0] == first
    assert document["sections"][0]["points"] == [TEXT, "Plain."]


def test_a_terminal_prints_the_figures_above_the_sections() -> None:
    screen = Console(file=io.StringIO(), width=80)
    print_document(DOCUMENT, screen)
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert lines.index("Longest: 45k tokens, 30 s limit") < lines.index("Answer")
    assert f"• {TEXT}" in lines
