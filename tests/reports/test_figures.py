"""Every number of every table agrees with a second computation from the records."""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.document import Document, Spread, Table
from longseq_bench.reports.kinds import documents
from longseq_bench.reports.sections.capabilities import CAPABILITIES
from longseq_bench.store import load
from tests import make
from tests.reports import examples
from tests.reports.oracle import Book, Search, Swept, by, middle, over, rounded
from tests.reports.reading import cells, rows

RESULTS = Path(__file__).parents[2] / "results" / "xeon2"


def spread(row: Swept) -> Spread | float | None:
    """The median time, with its interval if there are several samples."""
    return row.time if row.time is None or row.ends is None else Spread(row.time, *row.ends)


def largest(name: str) -> Callable[[Swept | Search], float | None]:
    return lambda r: r.largest(name)


def one_rank_ratio(row: Swept) -> Spread | float | None:
    """The speed-up of several ranks, with its interval if there is one."""
    low, high = row.speedup_ends
    if row.speedup is None or low is None or high is None:
        return row.speedup
    return Spread(row.speedup, low, high)


def verdict(ratio: Spread | float | None) -> str | None:
    if not isinstance(ratio, Spread):
        return None if ratio is None else "not known"
    if ratio.low <= 1 <= ratio.high:
        return "no significant difference"
    return "faster" if ratio.low > 1 else "slower"


Figures = dict[str, Callable[[Any], Any]]

SWEPT: Figures = {
    "Tokens": lambda r: r.tokens,
    "Ranks": lambda r: r.ranks,
    "Tokens per rank": lambda r: rounded(r.largest("own_tokens")),
    "Dtype": lambda r: r.workload.dtype,
    "Mode": lambda r: r.workload.mode,
    "Status": lambda r: r.status,
    "Time": spread,
    "Samples": lambda r: len(r.times),
    "Compute only": lambda r: middle(r.computing),
    "Communication only": lambda r: middle(r.communicating),
    "Exposed": lambda r: r.exposed,
    "Speed-up": lambda r: r.speedup,
    "Speed-up over one": one_rank_ratio,
    "Verdict": lambda r: verdict(one_rank_ratio(r)),
    "Efficiency": lambda r: over(r.speedup, r.ranks),
    "Bytes sent per rank": lambda r: rounded(r.largest("bytes_sent")),
    "Peak memory": lambda r: r.peak,
    "Peak of a rank": lambda r: r.peak,
    "Imbalance": lambda r: r.imbalance,
    "Tokens/s": lambda r: over(r.workload.batch * r.tokens, r.time),
    "Effective FLOP/s": lambda r: over(r.largest("flops"), r.time),
    "Max error": largest("max_error"),
    "Wire error": largest("wire_error"),
    "Requested density": largest("density_asked"),
    "Achieved density": largest("density_achieved"),
    "Uncovered": largest("uncovered"),
    "Zero rows": largest("zero_rows"),
    "Speed": lambda r: r.speed,
    "Density of pairs": lambda r: r.pairs_seen,
    "Pairs seen": lambda r: r.pairs_seen if r.sparse else None,
    "Preparation time": lambda r: middle(r.planning),
    "Dense time": lambda r: r.dense and r.dense[1],
    "Source of dense time": lambda r: r.dense and r.dense[0],
    "Dense kernel": lambda r: r.dense and str(r.outcome.facts.get("dense_kernel", "sdpa")),
    "Matrix product rate": largest("matmul_rate"),
    "Share of peak": lambda r: over(over(r.largest("flops"), r.time), r.largest("matmul_rate")),
    "Speed over dense": lambda r: r.dense and over(r.dense[1], r.time),
    "Share of ideal": lambda r: r.ideal and (r.ideal[0] if None in r.ideal else Spread(*r.ideal)),
    "Memory reduction": lambda r: r.saving,
    "Standard attention memory": lambda r: None if r.saving is None else r.standard[0],
    "Source of standard memory": lambda r: None if r.saving is None else r.standard[1],
    "Time on one": lambda r: r.alone and spread(r.alone),
    "Peak on one": lambda r: r.alone and r.alone.peak,
}
SEARCHES: Figures = {
    "Ranks": lambda s: s.ranks,
    "Max tokens": lambda s: s.tokens,
    "Time": lambda s: s.time,
    "Times as long": lambda s: s.alone and over(s.tokens, s.alone.tokens),
    "Fits in memory": lambda s: s.memory_alone,
    "Tokens per rank": lambda s: rounded(s.largest("own_tokens")),
    "First failure": lambda s: s.failed,
    "Limited by": lambda s: s.limited_by,
    "Phase": lambda s: s.phase,
    "Fraction of floor": lambda s: s.of_floor,
    "Floor": lambda s: s.floor_tokens,
    "Achieved density": largest("density_achieved"),
    "Peak memory": lambda s: s.peak,
    "Imbalance": lambda s: s.imbalance,
    "Bytes/token": lambda s: over(s.peak, s.tokens),
    "Predicted": lambda s: s.predicted,
    "Runs": lambda s: s.runs,
    "Confirmations": lambda s: s.confirmations,
    "Expected": lambda s: s.expected,
    "Of expected": lambda s: over(s.tokens, s.expected),
}


def agrees(cell: Any, figure: Any) -> bool:
    """Whether a cell has a value, to nine digits."""
    if isinstance(cell, Spread) and isinstance(figure, Spread):
        pairs = ((cell.value, figure.value), (cell.low, figure.low), (cell.high, figure.high))
        return all(agrees(a, b) for a, b in pairs)
    if isinstance(cell, float | int) and isinstance(figure, float | int):
        return math.isclose(cell, figure, rel_tol=1e-9) or (cell != cell and figure != figure)
    return bool(cell == figure)


def figures_of(book: Book, table: Table) -> tuple[Sequence[Any], Figures]:
    """The trials or searches of the rows, and the values by heading; empty for tables of text."""
    headings = {column.name for column in table.columns}
    if ONE_LINE_EACH.match(table.title):
        return (), {}
    if headings & {"Max tokens", "Bytes/token"}:
        return book.searches, SEARCHES
    if headings & WORDS:
        return (), {}
    return book.swept, SWEPT


WORDS = {
    "Asked for", "Tokens ^", "What", "Setting", "Warning",
    "Meaning", *CAPABILITIES,
}  # fmt: skip
"""Headings of tables with separate tests."""

ONE_LINE_EACH = re.compile(r"(\d+ of [\d,]+ rows: )?One line per ")
"""Titles of the first table of a summary, which has a test of its own."""
NOTHING = {"Uncovered", "Zero rows"}
"""Headings of shares that may be left out where they are 0."""


UNCHECKED = {"Implementation", "Unstable"}  # tests/analysis/test_stability.py


def wrong_rows(book: Book, table: Table) -> list[str]:
    """Rows that agree with no trial or search of their name."""
    known, figures = figures_of(book, table)
    if not figures:
        return []
    found = []
    for row in cells(table):
        name = row.get("Implementation")
        shown = {n: v for n, v in row.items() if n in figures}
        if missing := set(row) - set(shown) - UNCHECKED:
            found.append(f"{table.title}: no oracle for {missing}")
        names = [{one.label, getattr(one, "name", "")} for one in known]
        named = [one for one, called in zip(known, names, strict=True) if name in called]
        unlike = [unlike_figures(one, shown, figures) for one in named]
        if name and not any(not off for off in unlike):
            found.append(f"{table.title}: {row}: {min(unlike, key=len, default='no such name')}")
    return found


def unlike_figures(one: Any, shown: dict[str, Any], figures: Figures) -> dict[str, Any]:
    """The expected values that differ from the shown ones."""
    pairs = {n: (v, figures[n](one)) for n, v in shown.items()}
    none = {n for n in NOTHING & set(pairs) if not any(pairs[n])}
    return {n: f for n, (v, f) in pairs.items() if not agrees(v, f) and n not in none}


def failed_baseline() -> list[Record]:
    """dense has only the peak of a failure at the most frequent length."""
    failed = examples.failed("oom", "dense", 2000, phase="forward", peak=9e6)
    ok = [("dense", 1000), ("ring", 1000), ("ring", 2000), ("ulysses", 2000)]
    return [failed, *(examples.single(name, tokens, 1e-4 * tokens) for name, tokens in ok)]


def twice_on_one() -> list[Record]:
    """A trial on one rank that failed with few repeats and passed with more."""
    few, more = (make.trial("a", 1000, repeats=n) for n in (5, 6))
    two = few.replace(world_size=2)
    came_to = make.outcome("oom"), examples.timing(more, 0.1), examples.timings(two, 0.06)
    return [make.record(*pair) for pair in zip((few, more, two), came_to, strict=True)]


EXAMPLES: dict[str, Callable[[], list[Record]]] = {
    "rich": examples.rich,
    "sparse": examples.sparser,
    "two machines": lambda: examples.on_two_machines([*examples.rich(), *examples.sparser()]),
    "a failed baseline": failed_baseline,
    "twice on one rank": twice_on_one,
}
REAL = ("quickstart", "ranks", "extreme", "parallel", "sparsity", "ring_transports")


Case = tuple[Book, list[Document]]
"""The expected values of a set of records, and all its reports."""


@cache
def reports(name: str) -> Case:
    records = EXAMPLES[name]() if name in EXAMPLES else load(RESULTS / name).records
    base = "dense" if name == "sparse" else None
    return Book(records, base), documents(records, ["all"], baseline=base)


@pytest.fixture(params=[*EXAMPLES, *REAL])
def case(request: pytest.FixtureRequest) -> Case:
    return reports(request.param)


def test_every_number_agrees_with_the_records(case: Case) -> None:
    book, found = case
    tables = [t for document in found for s in document.sections for t in s.tables]
    assert [line for table in tables for line in wrong_rows(book, table)] == []


def time_end(one: Any) -> float:
    """The end of the interval of a time; the time itself of a single pass."""
    time = spread(one)
    return time.high if isinstance(time, Spread) else float(time)


def test_the_first_table_has_the_fastest_and_the_longest(case: Case) -> None:
    book, found = case
    summary = next(document for document in found if document.kind == "summary")
    every = [*book.swept, *book.searches]
    alone = len({one.implementation for one in every}) == 1

    def kind_of(one: Any) -> str:
        return str(one.label if alone else one.implementation)

    one_each = "All implementations" in [s.title for s in summary.sections]
    for row in rows(summary, "All implementations" if one_each else "Answer"):
        if isinstance(row.get("Time"), Spread | float):
            named = [r for r in book.swept if r.name == row["Implementation"]]
            one = next(r for r in named if agrees(row["Time"], spread(r)))
            assert agrees(row["Peak memory"], one.peak)
            assert agrees(row.get("Pairs seen"), one.pairs_seen if one.sparse else None)
            rivals = [
                time_end(r) for r in book.swept
                if r.ok and r.time and kind_of(r) == kind_of(one)
                and (r.tokens, r.group) == (one.tokens, one.group)
            ]  # fmt: skip
            assert time_end(one) == min(rivals)
        if row.get("Max tokens"):
            (kind,) = {kind_of(one) for one in every if one.name == row["Implementation"]}
            tokens = row["Max tokens"].partition(" ")[0].replace("none", "0")
            longest = [s for s in book.searches if (kind_of(s), f"{s.tokens:,}") == (kind, tokens)]
            shown = row["Limited by"], row.get("Fraction of floor")
            assert any(all(map(agrees, shown, (s.limited_by, s.of_floor))) for s in longest)


def test_every_trial_and_search_is_reported(case: Case) -> None:
    book, found = case
    summary = next(document for document in found if document.kind == "summary")
    for title, known in (("Lengths swept", book.swept), ("Longest lengths", book.searches)):
        if known:
            shown = sorted(row["Implementation"] for row in rows(summary, title))
            assert shown == sorted(one.name for one in known)
            tables = next(s for s in summary.sections if s.title == title).tables
            assert len(tables) == len(by(lambda one: one.group, known))


def test_a_first_screen_has_five_figures_a_short_table_and_a_chart(case: Case) -> None:
    for document in case[1]:
        first = document.sections[0]
        assert len(document.figures) <= 5
        assert len(first.charts) <= 1
        assert len(first.tables) <= 1
        assert sum(len(table.rows) for table in first.tables) <= 8
        for section in document.sections:
            assert len(section.points) <= 5
            assert all(chart.points for chart in section.charts)


def test_relative_figures_are_against_the_baseline_at_that_length() -> None:
    records = examples.rich()
    book = Book(records, "sdpa")
    (document,) = documents(records, ["implementations"], baseline="sdpa")
    shown = [row for row in rows(document, "Answer") if row["Relative speed"]]
    assert shown
    (failed,) = documents(failed_baseline(), ["implementations"], baseline="dense")
    assert all("Relative speed" not in row for row in rows(failed, "Answer"))
    for row in shown:
        named = [r for r in book.swept if row["Implementation"] == r.name]
        named = [r for r in named if agrees(row["Time"], spread(r))] or named
        assert any(agrees(row["Relative speed"], r.speed) for r in named), row
