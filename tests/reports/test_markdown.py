"""Markdown: an independent parser reads back the rendered text."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from longseq_bench.reports import documents
from longseq_bench.reports.base import KINDS
from longseq_bench.reports.document import Column, Document, Finding, Section, Table
from longseq_bench.reports.render.markdown import MAX_WORDS, escape, render
from longseq_bench.store import RECORDS, load

NASTY = [
    "a|b", "<b>bold</b>", "two\nlines\r\nand\ttabs", "`code`", "*star* _under_ __init__", "a_b_c",
    "[link](http://x)", "\\", "\\|", "back\\slash|", "&lt;", "&amp;", "# head", "- item", "1. one",
    "12) twelve", "+ plus", "~~gone~~", "<!-- hidden -->", "![i](j)", "---", "===", "a `` b ` c",
    "$x$", "| --- |", "> quote", "— ±2 % µs", "~~~", "```",
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
    assert page(Document("summary", "Title", ["Said."], [section])) == (
        "# Title\n\nSaid.\n\n## S\n\nP.\n\n- x\n\n### T\n\n"
        "| name | size |\n| --- | ---: |\n| a | 2 KiB |\n| b | — |\n\n"
        "```\nrun me\n```\n"
    )


def test_backticks_do_not_end_a_block_of_code() -> None:
    lines = ["echo ```", "````", "end"]
    tokens = MarkdownIt("commonmark").parse(
        page(Document("summary", "T", [], [Section("S", code=lines)]))
    )
    assert [t.content for t in tokens if t.type == "fence"] == ["\n".join(lines) + "\n"]


REAL = sorted((Path(__file__).parents[2] / "results").rglob(RECORDS))


@pytest.mark.parametrize("kind", KINDS.names())
def test_the_page_of_any_committed_records_has_at_most_1200_words(kind: str) -> None:
    assert MAX_WORDS == 1200
    every = [record for file in REAL for record in load(file).records]
    for records in (*(load(file).records for file in REAL), every):
        (document,) = documents(records, [kind])
        files = render(document.without_charts())
        assert list(files) == [f"{document.stem}.md", f"{document.stem}-details.md"]
        text, details = files.values()
        assert len(text.split()) <= MAX_WORDS
        assert f"]({document.stem}-details.md)" in text
        headings = re.findall(r"(?m)^## (.*)", text + details)
        titles = (escape(s.title) for s in document.sections)
        assert sorted(headings) == sorted(["Details", *titles])


def test_a_finding_on_the_page_has_a_link_to_its_rows_in_the_details() -> None:
    rows = tuple((f"row {i}",) for i in range(2000))
    sections = [
        Section("Answer", points=[Finding("Far.", "All rows")]),
        Section("All rows", tables=[Table("", (Column("a"),), rows)]),
    ]
    files = render(Document("summary", "T", [], sections))
    assert "- Far. ([rows](report-details.md#all-rows))" in files["report.md"]
    assert "row 1999" in files["report-details.md"]
