"""The report on extreme lengths: its tables and its first screen, recomputed from the records."""

import re
from typing import Any

import pytest

from longseq_bench.reports.document import Chart, Document
from tests.reports.oracle import Book, Search, Swept, by
from tests.reports.reading import cells, section, titles
from tests.reports.test_figures import reports

NAMES = ("rich", "sparse", "extreme", "sparsity")


def report(name: str) -> tuple[Book, Document]:
    book, found = reports(name)
    return book, next(document for document in found if document.kind == "extreme")


def table(document: Document, title: str) -> list[dict[str, Any]]:
    """The rows of the first table of a section; empty if the report lacks the section."""
    return cells(section(document, title).tables[0]) if title in titles(document) else []


def is_full(one: Swept | Search) -> bool:
    return not one.trial.fit_only and one.trial.keep != "nothing"


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rich", "extreme"])
def test_tables_begin_with_the_longest_length_of_a_full_pass(name: str) -> None:
    book, document = report(name)
    longest = max(s.tokens for s in book.searches if is_full(s))
    assert table(document, "Longest lengths")[0]["Max tokens"] == longest


# ---- charts --------------------------------------------------------------------------------------


def charts(document: Document, name: str) -> list[Chart]:
    return [c for s in document.sections for c in s.charts if c.name == name]


@pytest.mark.parametrize("name", NAMES)
def test_bars_are_the_longest_of_each_limit(name: str) -> None:
    """Sorted, of one limit per chart, with the floor; the longest 8 of each limit are drawn."""
    book, document = report(name)
    found = [s for s in book.searches if s.tokens and is_full(s)]

    def of(one: Search) -> tuple[Any, ...]:
        t = one.trial
        return one.fingerprint, one.workload.mode, t.device, t.memory_budget, t.time_budget

    expected = [sorted((s.tokens for s in group), reverse=True)[:8] for group in by(of, found)]
    confirmed = re.compile("Longest lengths(, the longest 8)?(:|$)")
    drawn = [c for c in charts(document, "maxima") if confirmed.match(c.title)]
    shown = [[p.y for p in chart.points] for chart in drawn]
    assert shown == sorted(expected, key=lambda tokens: -tokens[0])
    floors = {(s.tokens, s.floor_tokens) for s in found}
    for chart in drawn:
        own = {p.series: p.y for p in chart.points}
        for guide in chart.guides:
            assert {(own[p.series], p.y) for p in guide.points} <= floors
