"""Recommendations follow the rows: the best row is swapped, removed, failed, or part of a tie.

A rule gets rows made from the score of each implementation; larger is better. Only `pattern` in
RULES depends on the wording of its sentences.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import pytest

from longseq_bench.core.model import Record, Status
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Section
from longseq_bench.reports.sections.bottleneck import bottleneck
from longseq_bench.reports.sections.findings import findings
from longseq_bench.reports.sections.multi_rank import against_one, batches
from longseq_bench.reports.sections.recommendations import (
    fastest,
    longest,
    overhead,
    several_ranks,
    sparsity,
)
from longseq_bench.reports.sections.segments import curve, segments
from longseq_bench.reports.sections.sparse import sparse
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


def with_peaks(scores: Scores) -> list[Record]:
    """Trials of one time; a higher score is a lower peak."""
    return [single(name, TOKENS, 0.1, peak=5 * MIB / value) for name, value in scores.items()]


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


def with_imbalance(scores: Scores) -> list[Record]:
    """Trials on two ranks; a higher score is a larger imbalance."""
    return [
        make.record(
            make.trial(name, TOKENS, world_size=2),
            make.on_ranks(*({"time": spread(1.0, 8), "peak": MIB * n} for n in (1.0, 1 + value))),
        )
        for name, value in scores.items()
    ]


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


def on_more_ranks(scores: Scores) -> list[Record]:
    """Searches on one rank (1,000 tokens), and on two; the score is the gain."""
    return [*searched(dict.fromkeys(scores, 1)), *searched(scores, world_size=2)]


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


def points(section: Callable[[Source], Section]) -> Callable[[Source], Iterable[str]]:
    return lambda source: section(source).points


def lines(section: Callable[[Source], Section]) -> Callable[[Source], list[str]]:
    """The rows of a section's tables as text, with the headings of cells that have a value."""

    def texts(source: Source) -> list[str]:
        rows = [row for table in section(source).tables for row in cells(table)]
        return ["".join(f"{n}: {v}; " for n, v in row.items() if v is not None) for row in rows]

    return texts


def describe_use(source: Source) -> list[str]:
    """The attention for the first use case, exact and sparse."""
    return [line for line in lines(uses)(source) if "a conversation" in line and "Att" in line]


def find_bottleneck(source: Source) -> Iterator[str]:
    """The bottlenecks other than compute."""
    for table in bottleneck(source).tables:
        for row in cells(table):
            if row["Bottleneck"] != "compute":
                yield f"{row['Implementation']}: {row['Bottleneck']}"


class Rule(NamedTuple):
    """A rule, its records by score, and the pattern that finds the recommended implementation."""

    sentences: Callable[[Source], Iterable[str]]
    rows: Callable[..., list[Record]]
    pattern: str
    min_rows: int = 1  # that it takes for a recommendation

    def find(self, records: list[Record]) -> str | None:
        """The recommended implementation of these records."""
        found = re.search(self.pattern, "\n".join(self.sentences(Source(records))))
        return found[1] if found else None

    def best(self, scores: Scores, **more: object) -> str | None:
        """The recommended implementation of these scores."""
        return self.find(self.rows(scores, **more))


RULES = {
    "longest exact": Rule(lines(longest), searched, r"Kind: exact; Longest: (\w+);"),
    "longest sparse": Rule(
        lines(longest),
        lambda scores, **more: searched(scores, density=0.1, **more),
        r"Kind: sparse; Longest: (\w+);",
    ),
    "fastest": Rule(lines(fastest), timed, r"Lengths: 8k; Kind: exact; Fastest: (\w+);", 2),
    "fastest sparse": Rule(lines(fastest), with_dense, r"Kind: sparse; .*Fastest: (\w+);", 2),
    "fastest of a summary": Rule(findings, timed, r", (\w+) \([^)]*\) is the fastest of", 2),
    "lowest peak": Rule(findings, with_peaks, r", (\w+) \([^)]*\) has the lowest peak", 2),
    "scales best": Rule(findings, on_two_ranks, r", (\w+) \([^)]*\) scales best", 2),
    "share of ideal": Rule(
        points(sparse), with_dense, r", (\w+) \([^)]*\) reaches the highest share", 2
    ),
    "lengthens": Rule(points(against_one), on_more_ranks, r"On 2 ranks, (\w+) gains most"),
    "least even": Rule(points(batches), with_imbalance, r"Largest imbalance: (\w+) ×2"),
    "dilation": Rule(points(segments), dilated, r"Dilation gains most with (\w+) dilation 2"),
    "use by time": Rule(describe_use, timed, r"Kind: exact; Attention: (\w+); Ran at"),
    "use by sparse time": Rule(describe_use, with_dense, r"Kind: sparse; Attention: (\w+);"),
    "use by maximum": Rule(
        describe_use,
        lambda scores, **more: searched({k: 10 * v for k, v in scores.items()}, **more),
        r"Kind: exact; Attention: (\w+); Peak",
    ),
}
FIRST, SECOND = {"one": 3.0, "two": 2.0, "three": 1.2}, {"one": 2.0, "two": 3.0, "three": 1.2}


@pytest.mark.parametrize("name", RULES)
def test_the_best_is_recommended_also_when_scores_are_swapped(name: str) -> None:
    assert RULES[name].best(FIRST) == "one"
    assert RULES[name].best(SECOND) == "two"
    assert RULES[name].best(dict(reversed(FIRST.items()))) == "one"


@pytest.mark.parametrize("name", RULES)
def test_without_the_best_the_next_is_recommended(name: str) -> None:
    rest = {other: score for other, score in FIRST.items() if other != "one"}
    assert RULES[name].best(rest) == "two"
    last = RULES[name].best({"three": 1.2})
    assert last == ("three" if RULES[name].min_rows == 1 else None)


@pytest.mark.parametrize("name", RULES)
def test_no_failed_trial_is_recommended(name: str) -> None:
    assert RULES[name].find(failed(RULES[name].rows(FIRST))) is None


SINGLES = ("fastest", "fastest of a summary")


@pytest.mark.parametrize("name", SINGLES)
def test_single_passes_are_not_compared(name: str) -> None:
    rule = RULES[name]
    assert rule.best(FIRST, n=1) is None
    records = timed({"one": 3.0}, n=1) + timed({"two": 2.0, "three": 1.2})
    assert "one is the fastest" not in "".join(rule.sentences(Source(records)))


ALIKE = ("fastest", "fastest sparse", "fastest of a summary", "scales best", "share of ideal")


@pytest.mark.parametrize("name", ALIKE)
def test_overlapping_intervals_are_a_tie(name: str) -> None:
    near = {"one": 2.0, "two": 1.995, "three": 1.2}
    assert RULES[name].best(near) is None
    sentences = "\n".join(RULES[name].sentences(Source(RULES[name].rows(near))))
    tie = r"\btie\b.*: one \([^)]*\), two \(|no significant difference: one, two;.*Next: three"
    assert re.search(tie, sentences)


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
    assert "the lowest peak" not in "\n".join(findings(Source([narrow, wide, plain])))
    assert not fastest(Source([narrow, wide, plain])).tables
    records = [narrow, wide, plain, keeping("third", 0.1, 0.3), keeping("fourth", 0.48, 0.6)]
    text = "\n".join(findings(Source(records)))
    assert len(re.findall("fastest", text)) == 2
    assert re.search(r"other\b.* the fastest .*of density 9\.4 % to 10\.0 %.*next, third", text)
    assert re.search(r"window 2k.* the fastest .*of density 48\.0 % to 50\.0 %", text)
    found = [
        (r["Density"], r["Fastest"], r["Next"]) for r in cells(fastest(Source(records)).tables[0])
    ]
    assert [(density, next_) for density, _, next_ in found] == [(0.5, "fourth"), (0.094, "third")]
    assert "window 2k" in found[0][1]
    assert found[1][1] == "other"


def test_a_summary_compares_sparse_rows_on_equal_numbers_of_ranks() -> None:
    records = []
    for name, time in (("one", 0.1), ("two", 0.2)):
        for ranks in (1, 2):
            trial = make.trial(name, TOKENS, world_size=ranks)
            run = timings if ranks > 1 else timing
            outcome = run(trial, time / ranks, density_achieved=0.1)
            records.append(make.record(trial, outcome))
    one_rank, two_ranks = (text for text in findings(Source(records)) if "fastest" in text)
    assert re.search(r", one \(.* of 2 sparse of density 10.0 %, 2× .* next, two \(", one_rank)
    assert re.search(r", one ×2 .* sparse of density 10.0 % on 2 ranks, .*two ×2", two_ranks)


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
    assert not against_one(Source(two)).points
    assert not bottleneck(Source(two)).tables
    assert not overhead(Source(searched({"far": 20}, budget=2**30, **fields))).tables


def test_only_a_high_memory_overhead_is_reported() -> None:
    records = searched({"full": 8.0, "half": 4.0}, budget=2**26)
    (row,) = cells(overhead(Source(records)).tables[0])
    assert row["Implementation"] == "half"
    assert not overhead(Source(searched({"half": 4.0}, budget=2**26, failure=False))).tables


@pytest.mark.parametrize(
    ("rule", "rows", "against"),
    [
        (several_ranks, on_two_ranks, "one rank"),
        (sparsity, with_dense, "dense attention"),
    ],
)
def test_a_verdict_follows_its_interval(
    rule: Callable[[Source], Iterator[str]], rows: Callable[..., list[Record]], against: str
) -> None:
    def verdicts(scores: Scores) -> dict[str, str]:
        said = [re.match(r"(\w+)[^:]*: (.*)\.", s) for s in rule(Source(rows(scores)))]
        return {name: s[1] for s in said if s for name in re.findall(r"\b(up|same|down)\b", s[2])}

    assert verdicts({"up": 2, "same": 1, "down": 0.5}) == {
        "up": "Faster", "same": "Not", "down": "Slower"
    }  # fmt: skip
    assert verdicts({"up": 0.5, "same": 2, "down": 1}) == {
        "up": "Slower", "same": "Faster", "down": "Not"
    }  # fmt: skip
    assert all(against in sentence for sentence in rule(Source(rows({"up": 2}))))
    assert not list(rule(Source(failed(rows({"up": 2}), "crashed"))))


def shortest_recommended(*ends: float | Status) -> str | None:
    """The recommended shortest length of two ranks, by speed-ups or failures at 1k, 2k, 4k, ..."""
    found = []
    for i, end in enumerate(ends):
        one = make.trial("a", 1024 * 2**i)
        two = one.replace(world_size=2)
        outcome = make.outcome(end) if isinstance(end, str) else timings(two, 1 / end)
        found += [make.record(one, timing(one, 1.0)), make.record(two, outcome)]
    (sentence,) = several_ranks(Source(found))
    since = re.match(r"Faster than one rank from (\S+) tokens", sentence)
    return since[1] if since else None


def test_ranks_are_recommended_from_the_length_above_which_they_are_always_faster() -> None:
    assert shortest_recommended(0.5, 1.5, 1.8) == "2k"
    assert shortest_recommended(1.5, 0.5, 1.8) == "4k"
    assert shortest_recommended(1.5, 1.8, 1.9) == "1k"
    assert shortest_recommended(1.5, 1.8, 0.5) is None
    assert shortest_recommended(0.5, 0.6, 0.7) is None


def test_ranks_are_not_recommended_below_a_length_that_failed() -> None:
    assert shortest_recommended(2.0, "wrong", 2.0) == "4k"
    assert shortest_recommended("unsupported", 2.0, 2.0) == "2k"
    assert shortest_recommended(2.0, 2.0, "oom", "wrong") == "1k"


def test_a_single_pass_in_between_is_not_a_failure() -> None:
    found = []
    for tokens, n in ((1024, 9), (2048, 1), (4096, 9)):
        one = make.trial("a", tokens)
        two = one.replace(world_size=2)
        found += [make.record(one, timing(one, 1.0, n)), make.record(two, timings(two, 0.5, n))]
    (sentence,) = several_ranks(Source(found))
    assert sentence.startswith("Faster than one rank from 1k tokens")


@pytest.mark.parametrize(("gain", "n"), [(0.5, 9), (1.002, 9), (3.0, 1)])
def test_dilation_without_a_significant_speed_up_is_not_recommended(gain: float, n: int) -> None:
    records = [
        single("a", TOKENS, time, n, options={"segments": (1024,), "dilation": (rate,)})
        for rate, time in ((1, 1.0), (2, 1 / gain))
    ]
    (sentence,) = segments(Source(records)).points
    assert sentence.startswith("Dilation: no measurable speed-up")
    (sentence,) = segments(Source([*records, *dilated({"b": 1.2})])).points
    assert sentence.startswith("Dilation gains most with b dilation 2")


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
ADVICE = {
    **dict.fromkeys(("devices", "scaling", "implementations"), "Recommendations"),
    "capabilities": "Where it begins to pay",
}


@pytest.mark.parametrize("kind", ADVICE)
def test_a_section_of_failures_names_commands_to_run(kind: str) -> None:
    document = KINDS.get(kind)(Source(FAILED))
    (section,) = (s for s in document.sections if s.title == ADVICE[kind])
    assert not section.points
    assert all(line.startswith("longseq ") for line in section.code)
    assert section.paragraphs[0].startswith("These records have no pair of comparable rows.")


@pytest.mark.parametrize(
    "section", [uses, longest, fastest, segments, curve, against_one, against_standard]
)
def test_a_section_without_rows_names_commands_to_run(section: Callable[[Source], Section]) -> None:
    found = section(Source(FAILED))
    assert not found.has_content
    assert all(command.startswith("longseq ") for command in found.missing[1:])
