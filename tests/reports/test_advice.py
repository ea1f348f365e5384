"""Recommendations of a first screen: only where others are slower for certain."""

from longseq_bench.core.model import Record
from longseq_bench.reports.base import Source
from longseq_bench.reports.sections.advice import (
    beyond_exact,
    fastest_exact,
    several_ranks,
    sparse_over_exact,
)
from longseq_bench.reports.sections.capabilities import requirements
from tests import make
from tests.reports.examples import failed, single, timing, timings
from tests.reports.oracle import dense_flops
from tests.reports.reading import build, cells, section


def exact(name: str, *times: float, **more: object) -> list[Record]:
    """Times at 1k, 2k, 4k, ... tokens."""
    return [single(name, 1024 * 2**i, time, **more) for i, time in enumerate(times)]


def kept(name: str, tokens: int, time: float, share: float) -> Record:
    flops = share * dense_flops(make.trial(name, tokens).workload)
    return single(name, tokens, time, density_achieved=share, flops=flops)


def test_exact_attention_is_recommended_by_ranges_of_lengths() -> None:
    records = exact("sdpa", 0.1, 0.2, 0.4, 0.8) + exact("ring", 0.2, 0.4, 0.401, 0.4)
    records += exact("slow", 0.3, 0.6, 1.2, 2.4)
    assert list(fastest_exact(Source(records))) == [
        "Exact, 8k tokens: none is faster for certain than ring; sdpa takes 2× the time at 8k.",
        "Exact, 1k to 4k tokens: none is faster for certain than sdpa; "
        "slow takes 3× the time at 4k.",
    ]
    tie = exact("sdpa", 0.1) + exact("ring", 0.1001) + exact("slow", 0.3)
    (sentence,) = fastest_exact(Source(tie))
    assert sentence.startswith("Exact, 1k tokens: none is faster for certain than sdpa or ring; ")
    assert not list(fastest_exact(Source(exact("sdpa", 0.1) + exact("ring", 0.1001))))
    assert not list(fastest_exact(Source(exact("sdpa", 0.1, n=1) + exact("ring", 0.3, n=1))))


def test_sparse_attention_is_set_against_exact_with_what_it_leaves_out() -> None:
    records = [*exact("sdpa", 0.1, 0.4), kept("narrow", 2048, 0.05, 0.1)]
    records += [kept("broad", 2048, 0.2, 0.5), kept("useless", 2048, 0.401, 0.9)]
    assert list(sparse_over_exact(Source(records))) == [
        "Sparse, 2k tokens: narrow is 8× as fast as sdpa, without 90.0 % of the pairs; "
        "broad is 2× as fast as sdpa, without 50.0 % of the pairs."
    ]
    assert not list(sparse_over_exact(Source(records[2:])))
    assert not list(sparse_over_exact(Source([*exact("sdpa", 0.1), kept("no", 1024, 0.1, 0.5)])))


def test_lengths_that_only_sparse_attention_passed_are_named() -> None:
    records = [*exact("sdpa", 0.1), failed("timeout", "sdpa", 2048), kept("blocks", 4096, 0.2, 0.1)]
    (sentence,) = beyond_exact(Source(records))
    assert sentence == (
        "Exact attention passed up to 1k tokens (sdpa: timeout at 2k); "
        "blocks passed 4k, without 90.0 % of the pairs."
    )
    assert not list(beyond_exact(Source(records[::2])))


def searched(name: str, tokens: int, **more: float) -> list[Record]:
    samples = {"pass_time": 0.1, "peak": 1.0, **more}
    of = make.trial(name, 1, memory_budget=2**26, time_budget=30.0, repeats=0)
    passed = make.record(of.at(tokens), make.outcome(**samples), purpose="probe")
    return [passed, make.step(tokens + 64, "oom", of=of, purpose="edge")]


def test_a_search_for_sparse_attention_is_compared_under_equal_limits_only() -> None:
    found = searched("sdpa", 1000) + searched("blocks", 9000, density_achieved=0.25)
    (sentence,) = beyond_exact(Source(found))
    assert sentence == (
        "Exact attention passed up to 1,000 tokens (sdpa: memory); "
        "blocks passed 9,000, without 75.0 % of the pairs."
    )
    longer = [r.model_copy(update={"trial": r.trial.replace(time_budget=600.0)}) for r in found[2:]]
    assert not list(beyond_exact(Source(found[:2] + longer)))


def test_ranks_that_pay_and_ranks_that_do_not_are_named() -> None:
    records = []
    for name, gain in (("quick", 1.8), ("slow", 0.5)):
        one = make.trial(name, 2048)
        two = one.replace(world_size=2)
        records += [make.record(one, timing(one, 0.1)), make.record(two, timings(two, 0.1 / gain))]
    (sentence,) = several_ranks(Source(records))
    assert sentence.startswith("Faster on several ranks than on one: quick ×2 from 2k tokens (1.7")
    assert sentence.endswith("; slower: slow ×2.")


def test_what_did_not_run_is_one_line_and_no_row() -> None:
    missing = "the package natten is not installed: pip install natten"
    records = [
        *exact("sdpa", 0.1), failed("unsupported", "natten", 1024, missing),
        failed("unsupported", "fused", 1024, "it runs on cuda only"),
    ]  # fmt: skip
    answer = section(build(records), "Answer")
    assert answer.paragraphs == [
        "Not run: natten (not installed); fused (unsupported). Failures has the reasons."
    ]
    assert [row["Implementation"] for row in cells(answer.tables[0])] == ["sdpa"]
    assert list(requirements(Source(records))) == ["fused: it runs on cuda only."]


def test_a_first_table_has_one_variant_of_each_implementation() -> None:
    variants = [single("ring", 1024, 0.1 + i / 9, options={"chunk": 64 + i}) for i in range(9)]
    records = [*variants, *exact("sdpa", 0.9)]
    trials = [record.trial.replace(world_size=2) for record in records]
    two = [make.record(trial, timings(trial, 0.1 + i)) for i, trial in enumerate(trials)]
    document = build([*records, *two], "devices")
    (table,) = section(document, "Answer").tables
    assert [row["Implementation"] for row in cells(table)] == ["ring chunk 64 ×2", "sdpa ×2"]
    assert table.title.startswith("2 of 10 rows")
