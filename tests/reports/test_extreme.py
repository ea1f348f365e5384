"""The report on extreme lengths: its tables and its first screen, recomputed from the records."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from longseq_bench.reports.document import Chart, Document
from tests.reports.oracle import Book, Search, Swept, by, over
from tests.reports.reading import cells, section, titles
from tests.reports.test_figures import agrees, reports, spread

NAMES = ("rich", "sparse", "extreme", "sparsity")


def report(name: str) -> tuple[Book, Document]:
    book, found = reports(name)
    return book, next(document for document in found if document.kind == "extreme")


def table(document: Document, title: str) -> list[dict[str, Any]]:
    """The rows of the first table of a section; empty if the report lacks the section."""
    return cells(section(document, title).tables[0]) if title in titles(document) else []


def named(best: Sequence[Swept | Search]) -> str:
    """The name of the best, or of two of several that do not differ."""
    names = [one.name for one in best]
    if len(names) > 2:
        names = [*names[:2], f"{len(names) - 2:,} more"]
    return ", ".join(names) if len(best) == 1 else "no significant difference: " + ", ".join(names)


def is_full(one: Swept | Search) -> bool:
    return not one.trial.fit_only and one.trial.keep != "nothing"


def density(one: Swept | Search) -> float:
    kept = [s for r in one.records for s in r.outcome.samples("density_achieved")]
    if isinstance(one, Search):
        kept = [s for r in one.at for s in r.outcome.samples("density_achieved")]
    return min(1.0, max(kept, default=1.0))


def kind(one: Swept | Search) -> str:
    return "sparse" if density(one) < 1 else "exact"


def similar(rows: Sequence[Any]) -> Iterator[list[Any]]:
    """Rows whose density is within 10 % of the highest left."""
    left = list(rows)
    while left:
        least = 0.9 * max(map(density, left))
        yield [one for one in left if density(one) >= least]
        left = [one for one in left if density(one) < least]


def tied(rows: Sequence[Swept]) -> list[Swept]:
    """The fastest, and those whose interval begins below the end of its interval."""
    ordered = sorted(rows, key=lambda r: r.time or 0)
    end = (ordered[0].ends or (0, 0))[1]
    return [r for r in ordered if (r.ends or (0, 0))[0] <= end]


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_fastest_of_each_length(name: str) -> None:
    book, document = report(name)
    timed = [r for r in book.swept if r.time and len(r.times) > 1]
    compared = [
        group
        for same in by(lambda r: (r.group, r.ranks, kind(r), r.tokens), timed)
        for group in similar(same)
        if len(group) > 1
    ]
    shown = table(document, "Fastest by length")
    assert len(shown) == len(compared)
    for group in compared:
        best = tied(group)
        rest = sorted((r for r in group if r not in best), key=lambda r: r.time)
        sparse = kind(best[0]) == "sparse"
        expected = {
            "Tokens": best[0].tokens, "Kind": kind(best[0]), "Fastest": named(best),
            "Density": density(best[0]) if sparse else None, "Time": spread(best[0]),
            "Next": rest[0].name if rest else None,
            "Ratio": over(rest[0].time, best[0].time) if rest else None,
        }  # fmt: skip
        assert any(all(agrees(row.get(n), v) for n, v in expected.items()) for row in shown)


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
