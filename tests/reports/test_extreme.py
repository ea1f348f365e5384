"""The report on extreme lengths: its tables and its first screen, recomputed from the records."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from longseq_bench.core.units import format_seconds
from longseq_bench.reports.document import Chart, Document, Table
from longseq_bench.reports.sections.use_cases import TITLE
from tests.reports import examples
from tests.reports.oracle import Book, Search, Swept, by, over
from tests.reports.reading import build, cells, section, titles
from tests.reports.test_figures import agrees, reports, spread

NONE = "none ran this long"
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


def tied_maxima(found: Sequence[Search]) -> list[Search]:
    """The longest, and those that did not fail at its length or below."""
    ordered = sorted(found, key=lambda s: -s.tokens)
    most = ordered[0].tokens
    return [s for s in ordered if s.tokens == most or s.failed is None or s.failed > most]


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


def length(text: str) -> int:
    sizes = {"k": 1024, "M": 1024**2}
    digits = text.rstrip("kM").replace(",", "")
    return int(digits) * sizes.get(text[-1], 1)


def choose(rows: Sequence[Any], tokens: int) -> list[Any]:
    """The fastest and its ties at the shortest timed length; else the longest; else a swept one."""
    enough = [r for r in rows if r.tokens >= tokens]
    timed = [r for r in enough if isinstance(r, Swept) and r.time and len(r.times) > 1]
    if timed:
        shortest = min(r.tokens for r in timed)
        return tied(next(similar([r for r in timed if r.tokens == shortest])))
    if found := [r for r in enough if isinstance(r, Search)]:
        best = max(next(similar(found)), key=lambda s: s.tokens)
        others = [r for r in rows if isinstance(r, Search) and r.group == best.group]
        near = [r for r in others if r is not best and len(list(similar([r, best]))) == 1]
        return tied_maxima([best, *near])
    longest = max((r.tokens for r in enough), default=0)
    return next(similar([r for r in enough if r.tokens == longest])) if enough else []


def workloads(book: Book) -> list[list[Any]]:
    """Ok full passes and searches, by workload over all budgets."""
    known = [s for s in book.searches if s.tokens and is_full(s)]
    known += [r for r in book.swept if r.ok and is_full(r)]
    return by(lambda one: one.workload_key, known)


def wrong_choice(row: dict[str, Any], tokens: int, rows: Sequence[Any]) -> str:
    """The expected attention, if the row has another or other figures."""
    best = choose([r for r in rows if kind(r) == row["Kind"].partition(",")[0]], tokens)
    if not best:
        return "" if row["Attention"] == NONE else "none"
    swept = isinstance(best[0], Swept)
    time = spread(best[0]) if swept else None
    text = named(best)
    own = [r for r in rows if kind(r) == row["Kind"].partition(",")[0]]
    long = {r.name for r in own if r.tokens >= tokens}
    if swept and len(best[0].times) < 2:
        time = f"{format_seconds(time)} (one pass)" if time and len(best) == 1 else None
        text = f"{text.partition(': ')[2]} (not compared)" if len(best) > 1 else text
    if len(long) == len(best) == 1:
        text = f"only {text} ran this long"
    expected = {
        "Attention": text, "Time": time, "Ran at": best[0].tokens,
        "Density": density(best[0]) if kind(best[0]) == "sparse" else None,
    }  # fmt: skip
    unlike = {n: v for n, v in expected.items() if not agrees(row.get(n), v)}
    return str(unlike) if unlike else ""


def wrong_ranges(table: Table, rows: Sequence[Any]) -> list[str]:
    """What is wrong in ranges: they join, have the attention of their end, end at the longest."""
    found = []
    for k in dict.fromkeys(map(kind, rows)):
        lengths = by(lambda r: r.tokens, [r for r in rows if kind(r) == k])
        several = k == "sparse" and any(len([*similar(some)]) > 1 for some in lengths)
        own = [row for row in cells(table) if row["Kind"] == k + ", densest timed" * several]
        ends = [length(re.split(" to |up to |beyond ", row["Tokens"])[-1]) for row in own]
        choices = zip(own, [*ends[:-1], math.inf], strict=True)
        found += [wrong_choice(row, end, rows) for row, end in choices]
        starts = [re.split(" to |beyond ", row["Tokens"])[0] for row in own[1:-1]]
        same = [r.tokens for r in rows if kind(r) == k]
        is_joined = ends == sorted(ends) and list(map(length, starts)) == ends[:-2]
        is_short = all(one["Attention"] != other["Attention"] for one, other in pairwise(own))
        is_whole = ends[-1:] == [max(same)]
        found += [] if is_joined and is_short and is_whole else [f"ranges of {k}: {ends}"]
    return list(filter(None, found))


def count(rows: Iterable[Any]) -> int:
    return len({one.implementation for one in rows})


@pytest.mark.parametrize("name", NAMES)
def test_which_attention_for_which_length(name: str) -> None:
    """A table per workload; the first screen has one of them, with at most eight rows."""
    book, document = report(name)
    known = workloads(book)
    (found,) = [s.tables for s in document.sections if s.title == TITLE]
    known.sort(key=lambda rows: (-count(r for r in rows if isinstance(r, Search)), -count(rows)))
    assert [wrong_ranges(one, rows) for one, rows in zip(found, known, strict=True)] == [
        [] for _ in known
    ]
    (first,) = document.sections[0].tables
    assert first == found[0]
    assert len(first.rows) <= 8


def test_searches_under_other_budgets_are_no_ties() -> None:
    """The bracket of the second would not exclude the length of the first."""
    records = examples.search("one", 9000, memory_budget=2**26)
    records += examples.search("two", 8500, beyond=9000, memory_budget=2**27)
    first, *_ = cells(build(records, "extreme").sections[0].tables[0])
    assert (first["Tokens"], first["Attention"]) == ("up to 8,500", "one")
    assert "64 MiB a rank" in first["Limit"]


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
