"""Every number of every table agrees with a second computation from the records."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.core.hardware import profiles
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_share
from longseq_bench.reports import documents
from longseq_bench.reports.document import (
    MISSING,
    Document,
    Spread,
    Table,
    format_cell,
    format_ratio,
)
from longseq_bench.reports.sections.modes import CAPABILITIES
from longseq_bench.store import load
from tests import make
from tests.reports import examples
from tests.reports.oracle import (
    Book,
    Exponent,
    Fit,
    Sparsity,
    Swept,
    by,
    each_rank,
    middle,
    over,
)
from tests.reports.reading import cells, rows, section

RESULTS = Path(__file__).parents[2] / "results" / "xeon2"


def spread(row: Swept | Sparsity) -> Spread | float | None:
    """The median time, with its interval if there are several samples."""
    if isinstance(row, Sparsity):
        return middle(row.times)
    return row.time if row.time is None or row.ends is None else Spread(row.time, *row.ends)


def joined(each: Sequence[float | None] | None, write: Callable[[float], str]) -> str | None:
    """The values of all ranks, in order."""
    return " · ".join(MISSING if v is None else write(v) for v in each) if each else None


def largest_of_each(name: str) -> Callable[[Swept], str | None]:
    return lambda r: joined(each_rank(r.records, name, max), format_bytes)


def ideal_text(row: Swept) -> str | None:
    if row.ideal is None:
        return None
    share, low, high = row.ideal
    if low is None or high is None:
        return format_share(share)
    return f"{format_share(share)} ({format_share(low)} to {format_share(high)})"


def largest(name: str) -> Callable[[Swept], float | None]:
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
    "Batch": lambda r: r.workload.batch,
    "Tokens per rank": lambda r: rounded(r.largest("own_tokens")),
    "Status": lambda r: r.status,
    "Time": spread,
    "Samples": lambda r: len(r.times),
    "Compute only": lambda r: middle(r.computing),
    "Communication only": lambda r: middle(r.communicating),
    "Exposed": lambda r: r.exposed,
    "Speed-up": lambda r: r.speedup,
    "At least": lambda r: r.speedup_ends[0],
    "At most": lambda r: r.speedup_ends[1],
    "Verdict": lambda r: verdict(one_rank_ratio(r)),
    "Efficiency": lambda r: over(r.speedup, r.ranks),
    "Bytes sent per rank": lambda r: rounded(r.largest("bytes_sent")),
    "Peak memory": lambda r: r.peak,
    "Peak of a rank": lambda r: r.peak,
    "Least peak": lambda r: r.least_peak,
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
    "Sparsity of pairs": lambda r: None if r.pairs_seen is None else 1 - r.pairs_seen,
    "Preparation time": lambda r: middle(r.planning),
    "Dense time": lambda r: r.dense and r.dense[1],
    "Source of dense time": lambda r: r.dense and r.dense[0],
    "Speed over dense": lambda r: r.dense and over(r.dense[1], r.time),
    "Share of ideal": ideal_text,
    "Memory reduction": lambda r: r.saving,
    "Times less": lambda r: r.saving,
    "Source of standard memory": lambda r: None if r.saving is None else r.standard[1],
    "Which is": lambda r: r.standard[1],
    "Standard attention memory": lambda r: r.standard[0],
    "Time on one": lambda r: r.alone and spread(r.alone),
    "Peak on one": lambda r: r.alone and r.alone.peak,
    "Memory of each rank": lambda r: joined(r.rank_peaks, format_bytes),
    "Peak of each rank": lambda r: joined(r.rank_peaks, format_bytes),
    "Time of each rank": lambda r: joined(r.rank_times, format_seconds),
    "Bytes sent by each rank": largest_of_each("bytes_sent"),
    "By formula": largest_of_each("bytes_formula"),
}
SEARCHES: Figures = {
    "Ranks": lambda s: s.ranks,
    "Tokens": lambda s: s.tokens or None,
    "Max tokens": lambda s: s.tokens,
    "Longest ok": lambda s: s.tokens or None,
    "Found": lambda s: s.tokens,
    "Max on all": lambda s: s.tokens,
    "Max on one rank": lambda s: s.alone and s.alone.tokens,
    "Times as long": lambda s: s.alone and over(s.tokens, s.alone.tokens),
    "Of linear": lambda s: s.alone and over(s.tokens, s.alone.tokens * s.ranks),
    "Fits in memory": lambda s: s.memory_alone,
    "Tokens per rank": lambda s: rounded(max_of(s.at, "own_tokens")),
    "First failure": lambda s: s.failed,
    "Limited by": lambda s: s.limited_by,
    "Bottleneck": lambda s: s.limited_by,
    **dict.fromkeys(("Time", "Compute only", "Communication only", "Exposed"), lambda s: None),
    "Phase": lambda s: s.phase,
    "Fraction of floor": lambda s: s.of_floor,
    "Floor": lambda s: s.floor_tokens,
    "Overhead": lambda s: 1 - s.of_floor,
    "Peak memory": lambda s: s.peak,
    "Least peak": lambda s: s.least_peak,
    "Imbalance": lambda s: s.imbalance,
    "Bytes/token": lambda s: over(s.peak, s.tokens),
    "Predicted": lambda s: s.predicted,
    "Runs": lambda s: s.runs,
    "Confirmations": lambda s: s.confirmations,
    "Theory": lambda s: s.floor_tokens,
    "Expected": lambda s: s.expected,
    "Of expected": lambda s: over(s.tokens, s.expected),
    "Pairs seen": lambda s: max_of(s.at, "density_achieved"),
    "Peak of each rank": lambda s: joined(s.rank_peaks, format_bytes),
    **{
        f"{one.name}, {format_bytes(one.memory)}": (
            lambda s, memory=one.memory: s.peak and int(memory / (s.peak / s.tokens))
        )
        for one in profiles().values()
    },
}
SPARSITIES: Figures = {
    "Ranks": lambda s: s.ranks,
    "Tokens": lambda s: s.tokens,
    "Time": spread,
    "Peak memory": lambda s: s.peak,
    "Minimum sparsity": lambda s: sparsity_text(s.minimum, math.ceil),
    "Highest failed sparsity": lambda s: sparsity_text(s.too_dense, math.floor),
    "Limited by": lambda s: s.limited_by,
    "Confirmations": lambda s: s.confirmations,
    "Runs": lambda s: len(s.records),
}
FITS: Figures = {
    "Of": lambda f: f.quantity,
    "Tokens ^": lambda f: exponent_text(f.tokens),
    "Exponent of tokens": lambda f: exponent_text(f.tokens),
    "By formula": lambda f: exponent_text(f.formula and (f.formula, None, None)),
    "Ranks ^": lambda f: exponent_text(f.ranks),
    "Points": lambda f: f.points,
}


def rounded(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)


def max_of(records: Iterable[Record], name: str) -> float | None:
    return max((s for r in records for s in r.outcome.samples(name)), default=None)


def sparsity_text(value: float | None, rounded: Callable[[float], int]) -> str | None:
    """Five digits, rounded so that the shown sparsity passed, or failed, too."""
    return None if value is None else f"{rounded(value * 1e5) / 1e5:.5f}"


def exponent_text(one: Exponent | None) -> str | None:
    if one is None:
        return None
    ends = [f"{round(end, 2) + 0.0:.2f}" for end in one if end is not None]
    return ends[0] if len(ends) == 1 else f"{ends[0]} ({ends[1]} to {ends[2]})"


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
    if headings & {"Minimum sparsity"}:
        return book.sparsities, SPARSITIES
    of_searches = "Bottleneck" in headings and table.title.startswith("Longest lengths")
    if of_searches or headings & {"Max tokens", "Found", "Max on all", "Bytes/token"}:
        return book.searches, SEARCHES
    if "Relative speed" in headings:
        ranked = {
            "Time": lambda r: (
                spread(r) if r.ok else {"oom": "out of memory"}.get(r.status, r.status)
            ),
            "Peak memory": lambda r: r.peak if r.ok else None,
        }
        return book.swept, SWEPT | ranked
    if headings & {"Tokens ^"}:
        return book.fits, FITS
    if headings & WORDS or any(heading.startswith("On ") for heading in headings):
        return (), {}
    return book.swept, SWEPT


WORDS = {
    "Asked for", "Not measured", "What", "Setting", "Masks", "Longest ok", "Warning", "Compared",
    "Attention", "Longest", "Fastest", "Against", "Letter", *CAPABILITIES,
}  # fmt: skip
"""Headings of tables with separate tests."""
OF_PAIRS = {
    "Twice", "Time is", "Exponent of tokens", "Relative speed", "Relative memory", "Sparsity",
    "Speed of dilation", "Pairs without, times", "Along the sequence", "Along the curve",
    "The curve takes", "Bottleneck", "By", "Segments", "Dilation", "Published max",
    "Ratio to published", "Slower than the row above", "Workload", "Longest",
}  # fmt: skip
"""Headings of values of two rows or of options: tested below and in other files."""


ONE_LINE_EACH = re.compile(r"One line per |\d+ of [\d,]+ (implementation|variant)s")
"""Titles of the first table of a summary, which has a test of its own."""
NOTHING = {"Uncovered", "Zero rows"}
"""Headings of shares that may be left out where they are 0."""


def wrong_rows(book: Book, table: Table) -> list[str]:
    """Rows that agree with no trial or search of their name."""
    known, figures = figures_of(book, table)
    if not figures or any(column.name == "Twice" for column in table.columns):
        return []
    found = []
    for row in cells(table):
        name = row.get("Implementation")
        shown = {n: v for n, v in row.items() if n in figures and "(2)" not in n}
        if missing := set(row) - set(shown) - OF_PAIRS - {"Implementation", "By formula (2)"}:
            found.append(f"{table.title}: no oracle for {missing}")
        names = [{one.label, getattr(one, "name", "")} for one in known]
        if "Segments" in row:
            names = [{one.implementation} for one in known]
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


@cache
def reports(name: str) -> tuple[Book, list[Document]]:
    """The expected values of a set of records, and all its reports."""
    records = EXAMPLES[name]() if name in EXAMPLES else load(RESULTS / name).records
    base = "dense" if name == "sparse" else None
    return Book(records, base), documents(records, ["all"], baseline=base)


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_every_number_agrees_with_the_records(name: str) -> None:
    book, found = reports(name)
    tables = [t for document in found for s in document.sections for t in s.tables]
    assert [line for table in tables for line in wrong_rows(book, table)] == []


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_the_first_table_has_the_fastest_and_the_longest(name: str) -> None:
    book, found = reports(name)
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
                r.time for r in book.swept
                if r.ok and r.time and kind_of(r) == kind_of(one)
                and (r.tokens, r.group) == (one.tokens, one.group)
            ]  # fmt: skip
            assert one.time == min(rivals)
        if row.get("Longest"):
            (kind,) = {kind_of(one) for one in every if one.name == row["Implementation"]}
            tokens = row["Longest"].partition(" ")[0].replace("none", "0")
            longest = [s for s in book.searches if (kind_of(s), f"{s.tokens:,}") == (kind, tokens)]
            shown = row["Limited by"], row.get("Of the floor")
            assert any(all(map(agrees, shown, (s.limited_by, s.of_floor))) for s in longest)


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_every_trial_and_search_is_reported(name: str) -> None:
    book, found = reports(name)
    summary = next(document for document in found if document.kind == "summary")
    for title, known in (("Lengths swept", book.swept), ("Longest lengths", book.searches)):
        if known:
            shown = sorted(row["Implementation"] for row in rows(summary, title))
            assert shown == sorted(one.label for one in known)
            tables = next(s for s in summary.sections if s.title == title).tables
            assert len(tables) == len(by(lambda one: one.group, known))


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_labels_are_short_and_context_is_not_repeated(name: str) -> None:
    book, found = reports(name)
    for one in (*book.swept, *book.searches):
        assert len(one.name) <= 40
    for document in found:
        tables = [t for s in document.sections for t in s.tables]
        labels = {str(row.get("Implementation", "")) for t in tables for row in cells(t)}
        assert not [label for label in labels if len(label) > 40 or re.search("=|null|None", label)]
        shared = document.paragraphs[0].lower().rstrip(".").partition("; ")[0].split(", ")
        titles = [c.title for s in document.sections for c in s.charts] + [t.title for t in tables]
        assert not [title for title in titles if {*re.split(", |: ", title.lower())} & {*shared}]
        points = [point for s in document.sections for point in s.points]
        brackets = [words for point in points for words in re.findall(r"\(([^()]*)\)", point)]
        assert not [words for words in brackets if {*words.split(", ")} & {*shared}]


def test_a_slightly_wrong_number_is_found() -> None:
    book, found = reports("rich")
    summary = next(document for document in found if document.kind == "summary")
    table = next(s for s in summary.sections if s.title == "Lengths swept").tables[0]
    for at, column in enumerate(table.columns):
        cell = table.rows[0][at]
        if column.kind == "text" or cell is None:
            continue
        off = Spread(cell.value, cell.low, cell.high * 1.001) if isinstance(cell, Spread) else (
            float(cell) * 1.001 + 1e-9
        )  # fmt: skip
        spoilt = (*table.rows[0][:at], off, *table.rows[0][at + 1 :])
        assert wrong_rows(book, Table(table.title, table.columns, (spoilt,))), column.name


# ---- figures of two rows -------------------------------------------------------------------------


def pairs_of(book: Book, row: dict[str, Any]) -> list[tuple[Swept, Swept]]:
    """A trial timed at N tokens, and the same at 2N."""
    one = [r for r in book.swept if r.name == row["Implementation"] and r.time]
    two = [r for r in one if r.tokens == row["Twice"]]
    return [
        (a, b) for a in one for b in two if a.tokens == row["Tokens"] and a.but_ranks == b.but_ranks
    ]


def time_ratio(one: Swept, other: Swept) -> Any:
    """The ratio of two times, with the bounds that both intervals allow."""
    value = (one.time or 0) / (other.time or 1)
    if one.ends is None or other.ends is None:
        return value
    return Spread(value, one.ends[0] / other.ends[1], one.ends[1] / other.ends[0])


def ratio_against(book: Book, row: Swept, against: str) -> Spread | float | None:
    """The speed of a trial against one rank, dense attention, or the same with every rate 1."""
    if against == "one rank":
        return one_rank_ratio(row) if row.ranks > 1 else None
    if against == "dense attention":
        if not row.sparse or row.dense is None or not row.time:
            return None
        _, time, ends = row.dense
        if not (ends and row.ends):
            return time / row.time
        return Spread(time / row.time, ends[0] / row.ends[1], ends[1] / row.ends[0])
    plain = row.options | {"dilation": tuple(1 for _ in row.options.get("dilation", ()))}
    same = (
        r for r in book.swept if (r.tokens, r.ranks, r.group) == (row.tokens, row.ranks, row.group)
    )
    found = [r for r in same if r.implementation == row.implementation and r.options == plain]
    timed = row.time and found and found[0] is not row and found[0].time
    return time_ratio(found[0], row) if timed else None


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_a_verdict_and_its_length_agree_with_the_records(name: str) -> None:
    book, found = reports(name)
    tables = [t for document in found for s in document.sections for t in s.tables]
    for shown in (row for t in tables for row in cells(t) if "Against" in row):
        named = [r for r in book.swept if r.name == shown["Implementation"]]
        assert any(
            shown["Verdict"] == verdict(shown["Ratio"])
            and agrees(shown["Ratio"], ratio)
            and shown["From"] == expected_since(book, row, shown["Against"])
            for row in named
            if row.tokens == shown["At"] and (ratio := ratio_against(book, row, shown["Against"]))
        ), shown


def expected_since(book: Book, row: Swept, against: str) -> int | None:
    """The shortest length from which the verdict is that of `row` up to it, without a failure."""
    series = [r for r in book.swept if (r.but_ranks, r.ranks) == (row.but_ranks, row.ranks)]
    ratios = {r.tokens: ratio_against(book, r, against) for r in series if r.tokens <= row.tokens}
    timed = {n: verdict(ratio) for n, ratio in ratios.items() if isinstance(ratio, Spread)}
    if row.tokens not in timed:
        return None
    unlike = {n for n, word in timed.items() if word != timed[row.tokens]}
    unlike |= {r.tokens for r in series if not r.ok and r.tokens < row.tokens}
    return min(n for n in timed if not any(n <= other for other in unlike))


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_the_largest_error_is_that_of_all_its_trials(name: str) -> None:
    book, found = reports(name)
    (document,) = (document for document in found if document.kind == "capabilities")
    tables = [t for s in document.sections for t in s.tables]
    for shown in (row for t in tables for row in cells(t) if "Masks" in row):
        which = tuple(shown[name] for name in ("Implementation", "Ranks", "Dtype", "Mode"))
        same = [
            r for r in book.swept if (r.label, r.ranks, r.workload.dtype, r.workload.mode) == which
        ]
        limits = by(lambda r: (r.fingerprint, r.trial.memory_budget, r.trial.time_budget), same)
        errors = [[r.largest("max_error") for r in some if r.ok] for some in limits]
        assert shown["Largest error"] in [
            max((e for e in some if e is not None), default=None) for some in errors
        ]


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_key_figures_are_those_of_all_rows(name: str) -> None:
    book, found = reports(name)
    devices, scaling, capabilities = (
        next(d for d in found if d.kind == kind) for kind in ("devices", "scaling", "capabilities")
    )
    figures = {one.label: one for d in (devices, scaling, capabilities) for one in d.figures}
    if best := figures.get("Best speed-up"):
        first = rows(devices, "Answer")[0]
        one = next(r for r in book.swept if r.ranks > 1 and agrees(r.speedup, first["Speed-up"]))
        same = [r for r in book.swept if r.speedup and r.ranks > 1 and r.group == one.group]
        same = [r for r in same if r.tokens == one.tokens]
        assert best.value.split()[0] == format_ratio(max(r.speedup for r in same if r.speedup))
        known = [r for r in same if r.alone.peak and r.peak]
        least = min(known, key=lambda r: r.peak / r.alone.peak)
        assert least.name in figures["Least share of one rank's memory"].words
        exposed = figures["Waiting for communication (exposed)"]
        highest = format_share(max(r.exposed for r in same if r.exposed is not None))
        most = [r.name for r in same if format_share(r.exposed) == highest]
        assert highest in exposed.value
        assert exposed.words.removeprefix("most with ") in most
    if exponent := figures.get("Exponent of time over length"):
        shown = [row for row in rows(scaling, "Answer") if "Points" in row]
        label, points = exponent.words.split(", ")[:2]
        fits = [f for f in book.fits if (f.label, f.quantity) == (label, "time")]
        assert exponent.value in [exponent_text(f.tokens) for f in fits]
        assert int(points.split()[0]) >= max((row["Points"] for row in shown), default=0)
    if error := figures.get("Largest error"):
        ok = [r for r in book.swept if r.ok and r.largest("max_error") is not None]
        worst = max(r.largest("max_error") for r in ok)
        assert error.value == f"{worst:.2g}"
        charts = section(capabilities, "Answer").charts
        drawn = {p.y for chart in charts if chart.name == "error" for p in chart.points}
        groups = by(lambda r: r.group, ok)
        assert not drawn or drawn in [worst_errors(group) for group in groups]


def worst_errors(group: Sequence[Swept]) -> set[float]:
    """The largest errors by length of the worst label of each implementation."""
    found = set()
    for some in by(lambda r: r.implementation, group):
        label = max(some, key=lambda r: r.largest("max_error")).label
        same = by(lambda r: r.tokens, [r for r in some if r.label == label])
        found |= {max(r.largest("max_error") for r in rows) for rows in same}
    return found


@pytest.mark.parametrize("name", [*EXAMPLES, *REAL])
def test_only_a_kind_without_rows_has_sections_without_rows(name: str) -> None:
    for document in reports(name)[1]:
        texts = [text for s in document.sections for text in s.paragraphs]
        empty = any(text.startswith("These records have no ") for text in texts)
        assert not (empty and document.has_rows)


@pytest.mark.parametrize("name", ["rich", "sparse", "quickstart"])
def test_doubling_is_the_longer_time_divided_by_the_shorter(name: str) -> None:
    book, found = reports(name)
    extreme = next(document for document in found if document.kind == "extreme")
    fits: list[Fit] = [fit for fit in book.fits if fit.quantity == "time"]
    for row in rows(extreme, "Time a doubling"):
        if row["Tokens"] is not None:
            ratios = [time_ratio(two, one) for one, two in pairs_of(book, row)]
            assert any(agrees(row["Time is"], ratio) for ratio in ratios), row
        label = row["Implementation"].split(" ×")[0]
        expected = [exponent_text(fit.tokens) for fit in fits if fit.label == label]
        assert row["Exponent of tokens"] in (expected or [None]), row


@pytest.mark.parametrize(("name", "base"), [("rich", "sdpa"), ("a failed baseline", "dense")])
def test_relative_figures_are_against_the_baseline_at_that_length(name: str, base: str) -> None:
    book, _ = reports(name)
    found = documents(book_records(book), ["implementations"], baseline=base)
    (document,) = found
    for table in section(document, "Time, memory, relative speed").tables:
        above = None
        for row in cells(table):
            named = [r for r in book.swept if row["Implementation"] == r.name]
            ok = [r for r in named if r.time and agrees(row["Time"], spread(r))]
            if above and ok:
                assert row["Slower than the row above"] in {
                    over_above(a, b) for a in above for b in ok
                }
            above = ok
    shown = rows(document, "Time, memory, relative speed")
    assert shown
    for row in shown:
        named = [r for r in book.swept if row["Implementation"] == r.name]
        named = [r for r in named if agrees(row["Time"], spread(r))] or named
        possible = [relative_to(book, r, base) for r in named]
        assert any(agrees(row["Relative speed"], speed) for speed, _ in possible), row
        assert any(agrees(row["Relative memory"], memory) for _, memory in possible), row


def over_above(above: Swept, row: Swept) -> str:
    """The ratio of two times; a sign if their intervals overlap."""
    ratio = format_cell(over(row.time, above.time), "ratio")
    if above.ends is None or row.ends is None:
        return f"{ratio} (one pass)"
    return "≈" if row.ends[0] <= above.ends[1] else ratio


def book_records(book: Book) -> list[Record]:
    everything = [*book.swept, *book.searches, *book.sparsities]
    return [record for one in everything for record in one.records]


def relative_to(book: Book, row: Swept, base: str) -> tuple[float | None, float | None]:
    same = [
        r
        for r in book.swept
        if r.implementation == base and r.ok and r.tokens == row.tokens and r.group == row.group
    ]
    fewest = min(same, key=lambda r: r.ranks, default=None)
    times = {r.ranks: r.time for r in same if r.time}
    speed = over(times.get(row.ranks, times[min(times)]), row.time) if times else None
    memory = over(row.peak, fewest.peak) if fewest and row.ok and row.peak else None
    return speed, memory


def test_sparsity_of_a_search_and_of_a_sweep() -> None:
    book, found = reports("rich")
    extreme = next(document for document in found if document.kind == "extreme")
    shown = [row for row in rows(extreme, "Sparsity against length") if "Longest ok" in row]
    searched = [s for s in book.searches if "sparsity" in s.options]
    assert [(r["Longest ok"], r["First failure"], r["Failed by"]) for r in shown] == [
        (s.tokens, s.failed, s.limited_by) for s in searched
    ]
