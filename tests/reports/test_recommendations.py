"""Claims follow the rows: the winner is swapped, dropped, failed, or its interval overlaps.

A rule gets rows made from the worth of each implementation, larger is better. `named` in RULES is
the one place that knows how its sentences name the best.
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
    leanest,
    longest,
    ranks_pay,
    sparse_pays,
)
from longseq_bench.reports.sections.segments import curve, segments
from longseq_bench.reports.sections.sparse import sparse
from longseq_bench.reports.sections.standard_attention import against_standard
from longseq_bench.reports.sections.use_cases import uses
from tests import make
from tests.reports.examples import on_one, spread, took, took_on
from tests.reports.reading import cells

Worth = Mapping[str, float]
TOKENS = 8192
MIB = 2**20


def timed(worth: Worth, n: int = 9, **more: float) -> list[Record]:
    """Each timed at one length."""
    return [on_one(name, TOKENS, 1 / value, n, **more) for name, value in worth.items()]


def in_memory(worth: Worth) -> list[Record]:
    """Each with a peak."""
    return [on_one(name, TOKENS, 0.1, peak=5 * MIB / value) for name, value in worth.items()]


def beside_dense(worth: Worth) -> list[Record]:
    """Each sparse, timed beside dense attention."""
    flops = 4 * TOKENS**2 * 512 * 0.1
    kept = {"density_achieved": 0.1, "flops": flops, "dense_time": spread(1.0, 8)}
    return [on_one(name, TOKENS, 1 / value, 9, **kept) for name, value in worth.items()]


def on_two(worth: Worth) -> list[Record]:
    """Each on one rank, in a second, and on two."""
    found = []
    for name, value in worth.items():
        one = make.trial(name, TOKENS)
        two = one.replace(world_size=2)
        found += [make.record(one, took(one, 1.0)), make.record(two, took_on(two, 1 / value))]
    return found


def unevenly(worth: Worth) -> list[Record]:
    """Each on two ranks, of which one holds more."""
    return [
        make.record(
            make.trial(name, TOKENS, world_size=2),
            make.on_ranks(*({"time": spread(1.0, 8), "peak": MIB * n} for n in (1.0, 1 + value))),
        )
        for name, value in worth.items()
    ]


def searched(
    worth: Worth, budget: int = 2**28, density: float | None = None, open_: bool = False,
    **fields: object,
) -> list[Record]:  # fmt: skip
    """Each with a maximum of so many thousand tokens, and a failure a token above it."""
    found = []
    for name, value in worth.items():
        best = round(value * 1000)
        of = make.trial(name, 1, memory_budget=budget, repeats=0, **fields)
        more = {} if density is None else {"density_achieved": density}
        came_to = make.outcome(pass_time=0.1, peak=1e6, **more)
        found.append(make.record(of.at(best), came_to, purpose="probe"))
        if not open_:
            bad = make.outcome("oom", phase="forward")
            found.append(make.record(of.at(best + 1), bad, purpose="edge"))
    return found


def on_more_ranks(worth: Worth) -> list[Record]:
    """Each searched on one rank, to a thousand tokens, and on two."""
    return [*searched(dict.fromkeys(worth, 1)), *searched(worth, world_size=2)]


def dilated(worth: Worth) -> list[Record]:
    """Each with segments, without dilation and so many times as fast with it."""
    return [
        on_one(name, TOKENS, time, options={"segments": (1024,), "dilation": (rate,)})
        for name, value in worth.items()
        for rate, time in ((1, 1.0), (2, 1 / value))
    ]


def failed(records: Iterable[Record], status: Status = "oom") -> list[Record]:
    """The same trials, none of them ok."""
    return [r.model_copy(update={"outcome": make.outcome(status)}) for r in records]


def points(section: Callable[[Source], Section]) -> Callable[[Source], Iterable[str]]:
    """The sentences of a section."""
    return lambda source: section(source).points


def of_use(source: Source) -> Iterator[str]:
    """Who is named for the first use case, exact and sparse."""
    for table in uses(source).tables:
        name, _, exact, why, _, other, its, _ = table.rows[0]
        yield f"{name}: {exact} ({why}); {other} ({its})"


def find_bottleneck(source: Source) -> Iterator[str]:
    """Who is held back by communication."""
    for table in bottleneck(source).tables:
        for row in cells(table):
            if row["Bottleneck"] != "compute":
                yield f"{row['Bottleneck']} holds {row['Implementation']}"


class Rule(NamedTuple):
    """Sentences of a source, rows from what each is worth, and how the best is named."""

    said: Callable[[Source], Iterable[str]]
    rows: Callable[..., list[Record]]
    named: str
    fewest: int = 1
    """How many it takes for one to be named."""

    def find(self, records: list[Record]) -> str | None:
        """Who is named, if anyone."""
        found = re.search(self.named, "\n".join(self.said(Source(records))))
        return found[1] if found else None

    def best(self, worth: Worth, **more: object) -> str | None:
        """Who is named of rows of this worth."""
        return self.find(self.rows(worth, **more))


RULES = {
    "longest exact": Rule(longest, searched, r"by exact attention \([^)]*\): (\w+) \("),
    "longest sparse": Rule(
        longest,
        lambda worth, **more: searched(worth, density=0.1, **more),
        r"by sparse attention \([^)]*\): (\w+) \(",
    ),
    "fastest": Rule(fastest, timed, r"At 8k tokens, (\w+) is the fastest exact", 2),
    "fastest sparse": Rule(fastest, beside_dense, r"At 8k tokens, (\w+) is the fastest sparse", 2),
    "fastest of a summary": Rule(findings, timed, r", (\w+) \([^)]*\) is the fastest of", 2),
    "lowest peak": Rule(findings, in_memory, r", (\w+) \([^)]*\) has the lowest peak", 2),
    "scales best": Rule(findings, on_two, r", (\w+) \([^)]*\) scales best", 2),
    "share of ideal": Rule(
        points(sparse), beside_dense, r", (\w+) \([^)]*\) reaches the highest share", 2
    ),
    "lengthens": Rule(points(against_one), on_more_ranks, r"Ranks lengthen (\w+) most"),
    "least even": Rule(points(batches), unevenly, r"Least even \([^)]*\): (\w+) on 2"),
    "dilation": Rule(points(segments), dilated, r"brings most to (\w+) dilation=\(?2"),
    "use by time": Rule(of_use, timed, r"conversation: (\w+) \(ran"),
    "use by sparse time": Rule(of_use, beside_dense, r"\); (\w+) \(ran"),
    "use by maximum": Rule(
        of_use,
        lambda worth, **more: searched({k: 10 * v for k, v in worth.items()}, **more),
        r"conversation: (\w+) \(takes",
    ),
}
FIRST, SECOND = {"one": 3.0, "two": 2.0, "three": 1.2}, {"one": 2.0, "two": 3.0, "three": 1.2}


@pytest.mark.parametrize("name", RULES)
def test_the_best_is_named_and_the_other_when_they_are_swapped(name: str) -> None:
    assert RULES[name].best(FIRST) == "one"
    assert RULES[name].best(SECOND) == "two"
    assert RULES[name].best(dict(reversed(FIRST.items()))) == "one"


@pytest.mark.parametrize("name", RULES)
def test_without_the_best_the_next_is_named(name: str) -> None:
    rest = {other: worth for other, worth in FIRST.items() if other != "one"}
    assert RULES[name].best(rest) == "two"
    last = RULES[name].best({"three": 1.2})
    assert last == ("three" if RULES[name].fewest == 1 else None)


@pytest.mark.parametrize("name", RULES)
def test_where_all_failed_nobody_is_named(name: str) -> None:
    assert RULES[name].find(failed(RULES[name].rows(FIRST))) is None


SINGLES = ("fastest", "fastest of a summary")


@pytest.mark.parametrize("name", SINGLES)
def test_single_passes_take_no_part(name: str) -> None:
    rule = RULES[name]
    assert rule.best(FIRST, n=1) is None
    records = timed({"one": 3.0}, n=1) + timed({"two": 2.0, "three": 1.2})
    assert "one is the fastest" not in "".join(rule.said(Source(records)))


ALIKE = ("fastest", "fastest sparse", "fastest of a summary", "scales best", "share of ideal")


@pytest.mark.parametrize("name", ALIKE)
def test_whose_intervals_overlap_are_not_told_apart(name: str) -> None:
    near = {"one": 2.0, "two": 1.995, "three": 1.2}
    assert RULES[name].best(near) is None
    told = "\n".join(RULES[name].said(Source(RULES[name].rows(near))))
    assert re.search(r"can't be told apart|no \w+ attention is the fastest", told)
    assert re.search(r"one \([^)]*\)(,| and) two \(", told)


def test_brackets_that_overlap_name_no_longest() -> None:
    records = searched({"one": 8.0}) + searched({"two": 7.0}, open_=True)
    (said,) = longest(Source(records))
    assert "their brackets overlap, so none is named the longest" in said
    assert "one (8,000 tokens" in said
    assert "two (7,000 tokens, no longer length failed" in said


@pytest.mark.parametrize("rule", [longest, fastest])
def test_exact_and_sparse_are_never_compared(
    rule: Callable[[Source], Iterable[str]],
) -> None:
    if rule is longest:
        records = searched({"one": 2, "two": 1}) + searched({"s": 90, "t": 80}, density=0.1)
    else:
        records = timed({"one": 2, "two": 1}) + beside_dense({"s": 90, "t": 80})
    exact, other = rule(Source(records))
    assert re.search(r"\bone\b", exact)
    assert re.search(r"\bs\b", other)
    assert not re.search(r"\b(s|t)\b \(", exact)
    assert not re.search(r"\b(one|two)\b", other)


def at_lengths(name: str, time: float, statuses: dict[int, Status]) -> list[Record]:
    """One over lengths of so many thousand tokens: timed, or what it came to."""
    return [
        on_one(name, 1024 * n, n * time)
        if status == "ok"
        else make.record(make.trial(name, 1024 * n), make.outcome(status))
        for n, status in statuses.items()
    ]


@pytest.mark.parametrize("status", ["wrong", "oom", "unsupported"])
def test_a_run_of_lengths_ends_where_its_winner_failed(status: Status) -> None:
    def spans(one: dict[int, Status], two: dict[int, Status]) -> list[str]:
        records = at_lengths("one", 0.01, one) + at_lengths("two", 0.02, two)
        return [said.split(", the next")[0].split(" is ")[0] for said in fastest(Source(records))]

    ok: dict[int, Status] = {1: "ok", 2: "ok", 4: "ok"}
    apart = ["At 1k tokens, one", "At 4k tokens, one"]
    assert spans(ok, ok) == ["From 1k to 4k tokens, one"]
    assert spans(ok | {2: status}, ok) == apart
    assert spans(ok | {2: status}, {1: "ok", 4: "ok"}) == apart
    assert spans(ok, ok | {2: status}) == ["From 1k to 4k tokens, one"]
    assert spans({1: "ok", 4: "ok"}, ok) == ["From 1k to 4k tokens, one"]
    assert spans(ok | {8: status}, ok) == ["From 1k to 4k tokens, one"]


def keeping(name: str, density: float, time: float, tokens: int = TOKENS, **more: object) -> Record:
    """One that keeps so much."""
    return on_one(name, tokens, time, density_achieved=density, **more)


def test_only_what_skips_about_as_much_is_compared() -> None:
    asked = {"sparsity": 0.9}
    narrow = keeping("blocks", 0.03, 0.1, options={**asked, "window": 128})
    wide = keeping("blocks", 0.5, 0.5, options={**asked, "window": 2048})
    plain = keeping("other", 0.094, 0.2)
    for rule in (fastest, findings):
        said = "\n".join(rule(Source([narrow, wide, plain])))
        assert "is the fastest" not in said
        assert "the lowest peak" not in said
        records = [narrow, wide, plain, keeping("third", 0.1, 0.3), keeping("fourth", 0.48, 0.6)]
        said = "\n".join(rule(Source(records)))
        assert len(re.findall("fastest", said)) == 2
        assert re.search(r"other\b.* the fastest .*of density 9\.4 % to 10\.0 %.*next, third", said)
        assert re.search(r"window=2048.* the fastest .*of density 48\.0 % to 50\.0 %", said)


def test_a_summary_compares_sparse_attention_on_as_many_ranks() -> None:
    records = []
    for name, time in (("one", 0.1), ("two", 0.2)):
        for ranks in (1, 2):
            trial = make.trial(name, TOKENS, world_size=ranks)
            how = took_on(trial, time / ranks, density_achieved=0.1) if ranks > 1 else took(
                trial, time, density_achieved=0.1
            )  # fmt: skip
            records.append(make.record(trial, how))
    said = [one for one in findings(Source(records)) if "fastest" in one]
    assert len(said) == 2
    assert re.search(r", one \(.* of 2 sparse of density 10.0 %, 2× .* next, two \(", said[0])
    assert re.search(r", one on 2 .* of 2 sparse of density 10.0 % on 2 ranks, .*two on 2", said[1])


UNLIKE = ({"fit_only": True}, {"keep": "nothing"})


@pytest.mark.parametrize("fields", UNLIKE)
def test_what_was_no_whole_pass_is_never_recommended(fields: dict[str, object]) -> None:
    short = searched({"far": 90}, **fields)
    both = [*short, *searched({"one": 20})]
    for rule in (longest, of_use):
        assert not list(rule(Source(short)))
        assert "far" not in "".join(rule(Source(both)))
        assert "one" in "".join(rule(Source(both)))
    two = [*short, *searched({"far": 200}, world_size=2, **fields)]
    assert not against_one(Source(two)).points
    assert not bottleneck(Source(two)).tables
    assert not list(leanest(Source(searched({"far": 20}, budget=2**30, **fields))))


def test_a_budget_that_is_wasted_is_reported_and_only_then() -> None:
    records = searched({"full": 8.0, "half": 4.0}, budget=2**26)
    (said,) = leanest(Source(records))
    assert "half" in said
    assert "full" not in said
    assert not list(leanest(Source(searched({"half": 4.0}, budget=2**26, open_=True))))


@pytest.mark.parametrize(
    ("rule", "rows", "against"),
    [(ranks_pay, on_two, "one rank"), (sparse_pays, beside_dense, "dense attention")],
)
def test_a_verdict_follows_its_interval(
    rule: Callable[[Source], Iterator[str]], rows: Callable[..., list[Record]], against: str
) -> None:
    def verdicts(worth: Worth) -> dict[str, str]:
        said = [re.match(r"(\w+).* \(.*cpu\): (.*)\.", s) for s in rule(Source(rows(worth)))]
        return {name: s[1] for s in said if s for name in re.findall(r"\b(up|same|down)\b", s[2])}

    assert verdicts({"up": 2, "same": 1, "down": 0.5}) == {
        "up": "Faster", "same": "Not", "down": "Slower"
    }  # fmt: skip
    assert verdicts({"up": 0.5, "same": 2, "down": 1}) == {
        "up": "Slower", "same": "Faster", "down": "Not"
    }  # fmt: skip
    assert all(against in sentence for sentence in rule(Source(rows({"up": 2}))))
    assert not list(rule(Source(failed(rows({"up": 2}), "crashed"))))


def pays_from(*ends: float | Status) -> str | None:
    """From which length two ranks pay, by the speed-ups or the failures at 1k, 2k, 4k, ..."""
    found = []
    for i, end in enumerate(ends):
        one = make.trial("a", 1024 * 2**i)
        two = one.replace(world_size=2)
        came_to = make.outcome(end) if isinstance(end, str) else took_on(two, 1 / end)
        found += [make.record(one, took(one, 1.0)), make.record(two, came_to)]
    (said,) = ranks_pay(Source(found))
    since = re.match(r"Faster than one rank from (\S+) tokens", said)
    return since[1] if since else None


def test_ranks_pay_from_the_length_above_which_they_always_do() -> None:
    assert pays_from(0.5, 1.5, 1.8) == "2k"
    assert pays_from(1.5, 0.5, 1.8) == "4k"
    assert pays_from(1.5, 1.8, 1.9) == "1k"
    assert pays_from(1.5, 1.8, 0.5) is None
    assert pays_from(0.5, 0.6, 0.7) is None


def test_ranks_do_not_pay_from_below_a_length_that_failed() -> None:
    assert pays_from(2.0, "wrong", 2.0) == "4k"
    assert pays_from("unsupported", 2.0, 2.0) == "2k"
    assert pays_from(2.0, 2.0, "oom", "wrong") == "1k"


def test_a_single_pass_in_between_is_no_failure() -> None:
    found = []
    for tokens, n in ((1024, 9), (2048, 1), (4096, 9)):
        one = make.trial("a", tokens)
        two = one.replace(world_size=2)
        found += [make.record(one, took(one, 1.0, n)), make.record(two, took_on(two, 0.5, n))]
    (said,) = ranks_pay(Source(found))
    assert said.startswith("Faster than one rank from 1k tokens")


@pytest.mark.parametrize(("gain", "n"), [(0.5, 9), (1.002, 9), (3.0, 1)])
def test_dilation_that_brings_no_speed_is_not_said_to(gain: float, n: int) -> None:
    records = [
        on_one("a", TOKENS, time, n, options={"segments": (1024,), "dilation": (rate,)})
        for rate, time in ((1, 1.0), (2, 1 / gain))
    ]
    (said,) = segments(Source(records)).points
    assert not re.search(r"brings most", said)
    sure = dilated({"b": 1.2})
    (said,) = segments(Source([*records, *sure])).points
    assert re.search(r"brings most to b dilation=2", said)


def test_what_holds_back_follows_what_is_exposed() -> None:
    def of(share: float, **more: object) -> tuple[object, object]:
        trial = make.trial("a", TOKENS, world_size=2)
        section = bottleneck(Source([make.record(trial, took_on(trial, 1.0, share=share, **more))]))
        ((*_, what, why),) = section.tables[0].rows
        return what, why

    assert [of(share)[0] for share in (0.8, 0.3, 0.499)] == ["compute", "communication", "either"]
    assert all(exposed in str(of(0.8)[1]) for exposed in ("20.0 %",))
    assert list(find_bottleneck(Source(searched({"a": 9}, world_size=2)))) == ["memory holds a"]


FAILED = [
    make.record(make.trial("one", TOKENS, world_size=2), make.outcome("oom")),
    make.record(make.trial("one", TOKENS), make.outcome("crashed")),
    make.step(TOKENS, "oom"),
]
ADVICE = {
    **dict.fromkeys(("extreme", "devices", "scaling", "implementations"), "Recommendations"),
    "capabilities": "Where it begins to pay",
}


@pytest.mark.parametrize("kind", ADVICE)
def test_where_all_failed_the_section_says_what_to_run(kind: str) -> None:
    document = KINDS.get(kind)(Source(FAILED))
    (section,) = (s for s in document.sections if s.title == ADVICE[kind])
    assert not section.points
    assert all(line.startswith("longseq ") for line in section.code)
    assert "There is no pair of rows" in section.paragraphs[0]


@pytest.mark.parametrize("section", [uses, segments, curve, against_one, against_standard])
def test_a_section_without_rows_says_what_to_run(section: Callable[[Source], Section]) -> None:
    found = section(Source(FAILED))
    assert not found.has_content
    assert all(command.startswith("longseq ") for command in found.missing[1:])
