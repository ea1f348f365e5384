"""Recommendations: which rows are compared, and from which length a verdict holds.

Records are made from the score of each implementation; larger is better.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest

from longseq_bench.core.model import Record, Status
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Section
from longseq_bench.reports.sections.bottleneck import bottleneck
from longseq_bench.reports.sections.gains import DENSE, ONE_RANK, where_it_pays
from longseq_bench.reports.sections.multi_rank import against_one
from longseq_bench.reports.sections.recommendations import fastest, longest, overhead
from longseq_bench.reports.sections.segments import curve, segments
from longseq_bench.reports.sections.standard_attention import against_standard
from longseq_bench.reports.sections.use_cases import uses
from tests import make
from tests.reports.examples import single, spread, timing, timings
from tests.reports.reading import cells

Scores = Mapping[str, float]
TOKENS = 8192
MIB = 2**20


def timed(scores: Scores, n: int = 9, **more: float) -> list[Record]:
    """Trials of one length; the score is the speed."""
    return [single(name, TOKENS, 1 / value, n, **more) for name, value in scores.items()]


def with_dense(scores: Scores) -> list[Record]:
    """Sparse trials with a dense time; the score is the speed."""
    flops = 4 * TOKENS**2 * 512 * 0.1
    kept = {"density_achieved": 0.1, "flops": flops, "dense_time": spread(1.0, 8)}
    return [single(name, TOKENS, 1 / value, 9, **kept) for name, value in scores.items()]


def on_two_ranks(scores: Scores) -> list[Record]:
    """Trials of 1 s on one rank, and trials on two; the score is the speed-up."""
    found = []
    for name, value in scores.items():
        one = make.trial(name, TOKENS)
        two = one.replace(world_size=2)
        found += [make.record(one, timing(one, 1.0)), make.record(two, timings(two, 1 / value))]
    return found


def searched(
    scores: Scores, budget: int = 2**28, density: float | None = None, failure: bool = True,
    **fields: object,
) -> list[Record]:  # fmt: skip
    """Searches; the score is the maximum in thousands of tokens, with a failure 1 token above."""
    found = []
    for name, value in scores.items():
        best = round(value * 1000)
        of = make.trial(name, 1, memory_budget=budget, repeats=0, **fields)
        more = {} if density is None else {"density_achieved": density}
        outcome = make.outcome(pass_time=0.1, peak=1e6, **more)
        found.append(make.record(of.at(best), outcome, purpose="probe"))
        if failure:
            bad = make.outcome("oom", phase="forward")
            found.append(make.record(of.at(best + 1), bad, purpose="edge"))
    return found


def dilated(scores: Scores) -> list[Record]:
    """Trials with segments; the score is the speed-up by dilation."""
    return [
        single(name, TOKENS, time, options={"segments": (1024,), "dilation": (rate,)})
        for name, value in scores.items()
        for rate, time in ((1, 1.0), (2, 1 / value))
    ]


def failed(records: Iterable[Record], status: Status = "oom") -> list[Record]:
    """The same trials with a failed status."""
    return [r.model_copy(update={"outcome": make.outcome(status)}) for r in records]


def lines(section: Callable[[Source], Section]) -> Callable[[Source], list[str]]:
    """The rows of a section's tables as text, with the headings of cells that have a value."""

    def texts(source: Source) -> list[str]:
        rows = [row for table in section(source).tables for row in cells(table)]
        return ["".join(f"{n}: {v}; " for n, v in row.items() if v is not None) for row in rows]

    return texts


def describe_use(source: Source) -> list[str]:
    """The attention for the shortest lengths, exact and sparse."""
    return [line for line in lines(uses)(source) if "Tokens: up to" in line]


def find_bottleneck(source: Source) -> Iterator[str]:
    """The bottlenecks other than compute."""
    for table in bottleneck(source).tables:
        for row in cells(table):
            if row["Bottleneck"] != "compute":
                yield f"{row['Implementation']}: {row['Bottleneck']}"


def at_lengths(name: str, time: float, statuses: dict[int, Status]) -> list[Record]:
    """Trials by length in thousands of tokens: timed if ok, else with this status."""
    return [
        single(name, 1024 * n, n * time)
        if status == "ok"
        else make.record(make.trial(name, 1024 * n), make.outcome(status))
        for n, status in statuses.items()
    ]


@pytest.mark.parametrize("status", ["wrong", "oom", "unsupported"])
def test_a_span_of_lengths_ends_where_its_fastest_failed(status: Status) -> None:
    def spans(one: dict[int, Status], two: dict[int, Status]) -> list[str]:
        records = at_lengths("one", 0.01, one) + at_lengths("two", 0.02, two)
        (table,) = fastest(Source(records)).tables
        return [f"{row['Lengths']}: {row['Fastest']}" for row in cells(table)]

    ok: dict[int, Status] = {1: "ok", 2: "ok", 4: "ok"}
    split, whole = ["1k: one", "4k: one"], ["1k to 4k: one"]
    assert spans(ok, ok) == whole
    assert spans(ok | {2: status}, ok) == split
    assert spans(ok | {2: status}, {1: "ok", 4: "ok"}) == split
    assert spans(ok, ok | {2: status}) == whole
    assert spans({1: "ok", 4: "ok"}, ok) == whole
    assert spans(ok | {8: status}, ok) == whole


def keeping(name: str, density: float, time: float, tokens: int = TOKENS, **more: object) -> Record:
    """A sparse trial with this achieved density."""
    return single(name, tokens, time, density_achieved=density, **more)


def test_only_rows_of_similar_density_are_compared() -> None:
    sparsity = {"sparsity": 0.9}
    narrow = keeping("blocks", 0.03, 0.1, options={**sparsity, "window": 128})
    wide = keeping("blocks", 0.5, 0.5, options={**sparsity, "window": 2048})
    plain = keeping("other", 0.094, 0.2)
    assert not fastest(Source([narrow, wide, plain])).tables
    records = [narrow, wide, plain, keeping("third", 0.1, 0.3), keeping("fourth", 0.48, 0.6)]
    found = [
        (r["Density"], r["Fastest"], r["Next"]) for r in cells(fastest(Source(records)).tables[0])
    ]
    assert [(density, next_) for density, _, next_ in found] == [(0.5, "fourth"), (0.094, "third")]
    assert "window 2k" in found[0][1]
    assert found[1][1] == "other"


INCOMPLETE = ({"fit_only": True}, {"keep": "nothing"})


@pytest.mark.parametrize("fields", INCOMPLETE)
def test_only_full_passes_are_recommended(fields: dict[str, object]) -> None:
    short = searched({"far": 90}, **fields)
    both = [*short, *searched({"one": 20})]
    for rule in (lines(longest), describe_use):
        assert not list(rule(Source(short)))
        assert "far" not in "".join(rule(Source(both)))
        assert "one" in "".join(rule(Source(both)))
    two = [*short, *searched({"far": 200}, world_size=2, **fields)]
    assert not against_one(Source(two)).tables
    assert not bottleneck(Source(two)).tables
    assert not overhead(Source(searched({"far": 20}, budget=2**30, **fields))).tables


def test_only_a_high_memory_overhead_is_reported() -> None:
    records = searched({"full": 8.0, "half": 4.0}, budget=2**26)
    (row,) = cells(overhead(Source(records)).tables[0])
    assert row["Implementation"] == "half"
    assert not overhead(Source(searched({"half": 4.0}, budget=2**26, failure=False))).tables


def verdicts(section: Callable[[Source], Section], records: list[Record]) -> list[dict[str, Any]]:
    """The rows of the tables of verdicts."""
    found = (row for table in section(Source(records)).tables for row in cells(table))
    return [row for row in found if "Verdict" in row and "Against" in row]


def over_one(source: Source) -> Section:
    return where_it_pays(source, ONE_RANK)


@pytest.mark.parametrize(
    ("section", "rows", "against"),
    [
        (over_one, on_two_ranks, "one rank"),
        (lambda source: where_it_pays(source, DENSE), with_dense, "dense attention"),
        (segments, dilated, "every rate 1"),
    ],
)
def test_a_verdict_follows_its_interval(
    section: Callable[[Source], Section], rows: Callable[..., list[Record]], against: str
) -> None:
    def by_name(scores: Scores) -> dict[str, str]:
        found = verdicts(section, rows(scores))
        assert {row["Against"] for row in found} == {against}
        return {row["Implementation"].split()[0]: row["Verdict"] for row in found}

    names = "faster", "no significant difference", "slower"
    for scores in ({"a": 2, "b": 1, "c": 0.5}, {"b": 2, "c": 1, "a": 0.5}):
        assert by_name(scores) == dict(zip(scores, names, strict=True))
    assert not verdicts(section, failed(rows({"a": 2}), "crashed"))


def shortest_recommended(*ends: float | Status) -> int | None:
    """The length (k) from which two ranks pay, by speed-ups or failures at 1k, 2k, 4k, ..."""
    found = []
    for i, end in enumerate(ends):
        one = make.trial("a", 1024 * 2**i)
        two = one.replace(world_size=2)
        outcome = make.outcome(end) if isinstance(end, str) else timings(two, 1 / end)
        found += [make.record(one, timing(one, 1.0)), make.record(two, outcome)]
    (row,) = verdicts(over_one, found)
    return row["From"] // 1024 if row["Verdict"] == "faster" else None


def test_ranks_are_recommended_from_the_length_above_which_they_are_always_faster() -> None:
    assert shortest_recommended(0.5, 1.5, 1.8) == 2
    assert shortest_recommended(1.5, 0.5, 1.8) == 4
    assert shortest_recommended(1.5, 1.8, 1.9) == 1
    assert shortest_recommended(1.5, 1.8, 0.5) is None
    assert shortest_recommended(0.5, 0.6, 0.7) is None


def test_ranks_are_not_recommended_below_a_length_that_failed() -> None:
    assert shortest_recommended(2.0, "wrong", 2.0) == 4
    assert shortest_recommended("unsupported", 2.0, 2.0) == 2
    assert shortest_recommended(2.0, 2.0, "oom", "wrong") == 1


def test_a_single_pass_in_between_is_not_a_failure() -> None:
    found = []
    for tokens, n in ((1024, 9), (2048, 1), (4096, 9)):
        one = make.trial("a", tokens)
        two = one.replace(world_size=2)
        found += [make.record(one, timing(one, 1.0, n)), make.record(two, timings(two, 0.5, n))]
    (row,) = verdicts(over_one, found)
    assert (row["Verdict"], row["From"]) == ("faster", 1024)


@pytest.mark.parametrize("kind", ["devices", "capabilities"])
def test_a_single_pass_has_no_verdict(kind: str) -> None:
    one, two = make.trial("a", 1024), make.trial("a", 1024, world_size=2)
    records = [make.record(one, timing(one, 1.0, 1)), make.record(two, timings(two, 0.2, 1))]
    document = KINDS.get(kind)(Source(records))
    tables = [table for section in document.sections for table in section.tables]
    found = {row["Verdict"] for table in tables for row in cells(table) if "Verdict" in row}
    assert found == {"not known"}
    if kind == "devices":
        assert "(one pass, no interval)" in document.figures[0].value
        assert "247.5 % efficiency, more than the ranks explain" in document.figures[0].words


def test_the_first_screen_of_devices_has_three_lists() -> None:
    scores = {"up": 1.9, "near": 1.89, "same": 1.0, "down": 0.5}
    document = KINDS.get("devices")(Source(on_two_ranks(scores)))
    assert document.figures[0].words == "up ×2; no significant difference from 1 more"
    assert list(document.sections[0].points) == [
        "Faster than one rank, 2 of 4: up ×2, near ×2.",
        "No significant difference, 1 of 4: same ×2.",
        "Slower than one rank, 1 of 4: down ×2.",
    ]
    (chart,) = document.sections[0].charts
    assert chart.shape == "bars"
    assert {p.y for p in chart.guides[0].points} == {1.0}


def test_the_bottleneck_follows_the_exposed_share() -> None:
    def of(share: float, **more: object) -> tuple[object, object]:
        trial = make.trial("a", TOKENS, world_size=2)
        section = bottleneck(Source([make.record(trial, timings(trial, 1.0, share=share, **more))]))
        ((*_, limit, evidence),) = section.tables[0].rows
        return limit, evidence

    assert [of(share)[0] for share in (0.8, 0.3, 0.499)] == ["compute", "communication", "either"]
    assert "20.0 %" in str(of(0.8)[1])
    assert list(find_bottleneck(Source(searched({"a": 9}, world_size=2)))) == ["a: memory"]


FAILED = [
    make.record(make.trial("one", TOKENS, world_size=2), make.outcome("oom")),
    make.record(make.trial("one", TOKENS), make.outcome("crashed")),
    make.step(TOKENS, "oom"),
]
EMPTY = {
    "devices": "Ranks",
    "scaling": "Bottlenecks",
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_section_of_failures_names_commands_to_run(kind: str) -> None:
    document = KINDS.get(kind)(Source(FAILED))
    (section,) = (s for s in document.sections if s.title == EMPTY[kind])
    assert not section.points
    assert all(line.startswith("longseq ") for line in section.code)
    assert section.paragraphs[0].startswith("These records have no ")


@pytest.mark.parametrize(
    "section", [uses, longest, fastest, segments, curve, against_one, against_standard]
)
def test_a_section_without_rows_names_commands_to_run(section: Callable[[Source], Section]) -> None:
    found = section(Source(FAILED))
    assert not found.has_content
    assert all(command.startswith("longseq ") for command in found.missing[1:])
