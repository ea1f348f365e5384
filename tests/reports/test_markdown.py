"""Markdown: an independent parser reads back the rendered text."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from longseq_bench import load
from longseq_bench.reports.document import Column, Document, KeyFigure, Section, Table
from longseq_bench.reports.kinds import documents
from longseq_bench.reports.render.markdown import render

RESULTS = Path(__file__).parents[2] / "results" / "xeon2"
NASTY = [
    "a|b", "<b>bold</b>", "two\nlines\r\nand\ttabs", "*star* _under_ __init__", "a_b_c",
    "[link](http://x)", "back\\slash|", "&lt;", "# head", "- item", "12) twelve", "~~gone~~",
    "<!-- hidden -->", "===", "a `` b ` c", "$x$", "> quote", "— ±2 % µs", "~~~", "```",
]  # fmt: skip


def parsed(markdown: str) -> dict[str, list[str]]:
    """The text of each kind of block, as GitHub shows it."""
    found: dict[str, list[str]] = {}
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    for before, token in pairwise(tokens):
        if token.type == "inline":
            parts = token.children or []
            assert {part.type for part in parts} <= {"text", "text_special"}, markdown
            found.setdefault(before.tag, []).append("".join(part.content for part in parts))
    return found


def page(document: Document) -> str:
    return render(document)["report.md"]


def test_a_page_without_charts_needs_nothing_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that only measures has no altair; a sweep there still ends with its report."""
    monkeypatch.setitem(sys.modules, "longseq_bench.reports.render._draw", None)
    assert "last" in page(one("text"))


def one(text: str) -> Document:
    table = Table(text, (Column(text), Column("n", "count")), ((text, 1), (None, 2)))
    return Document("summary", text, [text], [Section(text, [text], [text, "last"], [table])])


def check_reads_back(text: str) -> None:
    expected = " ".join(text.split())
    found = parsed(page(one(text)))
    assert found["h1"] == found["h2"] == found["h3"] == [expected]
    assert found["p"] == [expected, expected, expected, "last"]
    assert found["th"] == [expected, "n"]
    assert found["td"] == [expected, "1", "—", "2"]


@pytest.mark.parametrize("text", NASTY)
def test_nasty_names_show_as_they_are(text: str) -> None:
    check_reads_back(text)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab1 \\`*_{}[]()<>#+-.!|&;:~$=\"'/\n"), min_size=1, max_size=12))
def test_any_text_shows_as_it_is(text: str) -> None:
    if text.split():
        check_reads_back(text)


def test_the_whole_page() -> None:
    table = Table("T", (Column("name"), Column("size", "bytes")), (("a", 2048), ("b", None)))
    section = Section("S", ["P."], ["x"], [table], ["run me"])
    figures = [KeyFigure("Longest", "45k tokens", "30 s limit"), KeyFigure("Ranks", "2")]
    assert page(Document("summary", "Title", ["Said."], [section], figures=figures)) == (
        "# Title\n\nSaid.\n\n- Longest: **45k tokens**, 30 s limit\n- Ranks: **2**\n\n"
        "## S\n\nP.\n\n- x\n\n### T\n\n"
        "| name | size |\n| --- | ---: |\n| a | 2 KiB |\n| b | — |\n\n"
        "```\nrun me\n```\n"
    )


def test_details_are_a_second_file_with_links_from_the_page() -> None:
    table = Table("", (Column("name"),), (("a",), ("b",)))
    config = Section("Config: a/b_c.yaml", ["Long."], ["2 of 3.", "x"], [table], is_detail=True)
    sections = [Section("Answer", points=["4 rows."]), config]
    files = render(Document("summary", "Title", ["Said."], sections))
    assert [*files] == ["report.md", "report-details.md"]
    link = "report-details.md#config-ab_cyaml"
    assert files["report.md"] == (
        f"# Title\n\nSaid.\n\n## Answer\n\n- 4 rows.\n\n"
        f"## Details\n\n- [Config: a/b_c.yaml]({link}): 2 rows: 2 of 3.\n"
    )
    assert files["report-details.md"].startswith(
        "# Title: details\n\n[The answer](report.md)\n\n## Config: a/b_c.yaml\n\nLong.\n"
    )


@pytest.mark.parametrize("name", ["hilbert", "ranks"])
def test_the_first_file_of_every_kind_is_one_page(name: str) -> None:
    known = load(RESULTS / name)
    reports = documents(known.records, ["auto"], known.baseline, known.notes, known.configs)
    assert len(reports) >= 5
    for report in reports:
        text, *more = render(report.without_charts()).values()
        assert len(text.split()) <= 1200, report.kind
        assert len(more) == 1
