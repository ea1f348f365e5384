"""The answer by length: what was run, what is predicted, and both in words."""

from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import Record, TrialPrediction
from longseq_bench.reports.base import Source
from longseq_bench.reports.brief import answer_brief
from longseq_bench.reports.sections.by_length import answer_figures, by_length
from tests import make
from tests.reports.examples import search, single
from tests.reports.reading import build, cells

GIB = 2**30


def asked(name: str, tokens: int, time: float, foreseen_s: float, share: float = 1.0) -> Record:
    """A run whose prediction was `foreseen_s`; 32k takes 16 times that of 8k."""
    trial = make.trial(name, tokens, memory_budget=GIB, time_budget=10.0)
    more = {"density_achieved": share} if share < 1 else {}
    outcome = make.measured(time, flops=share * attention_flops(trial.workload), **more)
    at = {n: (foreseen_s * (n / tokens) ** 2, share) for n in (8192, 32768)}
    foreseen = TrialPrediction(
        seconds=foreseen_s, fits_tokens=100_000, fits_seconds=100 * foreseen_s, asked=at
    )
    return make.record(trial, outcome, foreseen=foreseen)


def records() -> list[Record]:
    return [
        asked("ring", 8192, 0.5, 2.0),
        asked("sdpa", 8192, 2.0, 2.0),
        asked("blocks", 8192, 0.1, 0.1, share=0.01),
        asked("blocks", 32768, 1.0, 1.0, share=0.01),
    ]


def said(found: list[Record]) -> dict[str, tuple[str, str]]:
    return {one.label: (one.value, one.words) for one in answer_figures(Source(found))}


def test_what_was_not_run_is_marked_and_corrected_by_what_the_last_run_took() -> None:
    table = by_length(Source(records())).tables[0]
    blocks, ring, sdpa = cells(table)
    assert [line["Implementation"] for line in (blocks, ring, sdpa)] == ["blocks", "ring", "sdpa"]
    assert (ring["32k"], sdpa["32k"]) == ("~8 s", "~32 s")
    assert (ring["8k"].value, blocks["32k"].value) == (0.5, 1.0)
    assert (ring["Longest in 1 GiB"], ring["A pass there"]) == ("~100,000", "~50 s")
    assert (blocks["Pairs seen at 32k"], ring["Pairs seen at 32k"]) == (0.01, None)
    assert table.title.endswith("~ is predicted from shorter runs, not run")


def test_a_figure_per_length_and_one_for_the_memory() -> None:
    found = said(records())
    assert [*found] == ["At 8k tokens", "At 32k tokens", "Longest in 1 GiB"]
    value, more = found["At 32k tokens"]
    assert value == "ring, ~8 s"
    assert more == "sparse: blocks, 1 s ±0.78 %, sees 1.0 % of the pairs"
    assert found["Longest in 1 GiB"][0] == "~100,000 tokens, ring, ~50 s a pass"
    assert said(records()[:1])["At 32k tokens"] == ("ring, ~8 s", "")
    slow = [asked("sdpa", 8192, 2.0, 2.0)]
    assert said(slow)["At 32k tokens"] == ("sdpa, ~32 s, over the time limit", "")


def test_a_pattern_that_sees_all_pairs_of_a_short_length_is_sparse_at_a_longer_one() -> None:
    """A run of 2k tokens in one segment of 2k shows no sparsity; its prediction does."""
    short = asked("dilated", 2048, 0.1, 0.1)
    assert short.foreseen
    at = {8192: (0.4, 0.5), 32768: (1.6, 0.1)}
    short = short.model_copy(update={"foreseen": short.foreseen.model_copy(update={"asked": at})})
    found = said([short, asked("ring", 8192, 0.5, 2.0)])
    assert found["At 32k tokens"] == (
        "ring, ~8 s",
        "sparse: dilated, ~1.6 s, sees 10.0 % of the pairs",
    )


def test_beyond_a_failure_nothing_is_predicted() -> None:
    wrong = make.record(
        make.trial("ring", 8192, memory_budget=GIB, time_budget=10.0), make.outcome("wrong", "bad")
    )
    (line,) = cells(by_length(Source([asked("ring", 2048, 0.1, 0.1), wrong])).tables[0])
    assert (line["8k"], line.get("32k"), line.get("Longest in 1 GiB")) == ("wrong", None, None)
    for label, value in said([asked("ring", 2048, 0.1, 0.1), wrong]).items():
        none = "not known" if label.startswith("Longest") else "no implementation passed"
        assert value == (none, "")


def test_calls_with_other_lengths_share_a_folder() -> None:
    later = asked("sdpa", 8192, 2.0, 2.0)
    assert later.foreseen
    more = later.foreseen.model_copy(update={"asked": {65536: (128.0, 1.0)}})
    found = [asked("ring", 8192, 0.5, 2.0), later.model_copy(update={"foreseen": more})]
    lines = {line["Implementation"]: line for line in cells(by_length(Source(found)).tables[0])}
    assert [lines["ring"][n] for n in ("32k", "64k")] == ["~8 s", None]
    assert [lines["sdpa"][n] for n in ("32k", "64k")] == [None, "~2 min 08 s"]


def test_predictions_that_may_be_equal_are_named_together() -> None:
    near = [asked("ring", 8192, 0.5, 2.0), asked("sdpa", 8192, 0.6, 2.0)]
    assert said(near)["At 32k tokens"][0] == "ring or sdpa, ~8 s"
    assert said(near)["At 8k tokens"][0].startswith("ring, 500 ms")


def test_a_length_beyond_the_memory_is_predicted_to_fail() -> None:
    (record,) = records()[:1]
    assert record.foreseen
    few = record.foreseen.model_copy(update={"fits_tokens": 20_000})
    small = [record.model_copy(update={"foreseen": few})]
    (line,) = cells(by_length(Source(small)).tables[0])
    assert line["32k"] == "~out of memory"
    assert said(small)["At 32k tokens"] == ("nothing fits in memory", "")


def test_the_longest_of_a_search_is_not_marked() -> None:
    found = [*search("ring", 99_000, memory_budget=GIB, fit_only=True), *records()]
    lines = {line["Implementation"]: line for line in cells(by_length(Source(found)).tables[0])}
    assert lines["ring"]["Longest in 1 GiB"] == "99,000"
    assert lines["sdpa"]["Longest in 1 GiB"] == "~100,000"


def test_a_report_of_the_folder_begins_with_the_same_answer() -> None:
    report, brief = build(records()), answer_brief(records())
    assert brief
    assert tuple(report.figures) == tuple(brief.figures)
    assert report.sections[0].tables[0].rows == brief.sections[0].tables[0].rows
    assert answer_brief([single("ring", 8192, 0.5)]) is None
