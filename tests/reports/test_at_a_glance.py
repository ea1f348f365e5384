"""The first table of a summary: one line per implementation, recomputed from the records."""

from statistics import median

import pytest

from longseq_bench.reports.document import Spread
from longseq_bench.reports.sections.at_a_glance import ALL
from tests.reports.examples import failed, rich, search, single
from tests.reports.reading import build, rows, section, texts, titles

TITLE = "Answer"


def test_times_are_of_the_length_that_most_share_and_the_fastest_variant() -> None:
    records = [
        single("sdpa", 1024, 0.3), single("sdpa", 8192, 9.0),
        single("ring", 1024, 0.2, options={"chunk": 512}),
        single("ring", 1024, 0.1, options={"chunk": 1024}),
        single("slow", 1024, 0.7), failed("oom", "big", 1024),
    ]  # fmt: skip
    lines = rows(build(records), TITLE)
    assert [line["Implementation"] for line in lines] == ["ring chunk 1k", "sdpa", "slow", "big"]
    times = [line["Time"] for line in lines]
    for time, record in zip(times, [records[3], records[0], records[4]], strict=False):
        assert isinstance(time, Spread)
        assert time.value == pytest.approx(median(record.outcome.samples("time")))
    assert times[-1] == "out of memory"
    assert "at 1k tokens" in section(build(records), TITLE).tables[0].title


def test_a_maximum_of_another_limit_names_it() -> None:
    records = [
        *search("sdpa", 5000, time_budget=30.0), *search("dense", 900, time_budget=30.0),
        *search("dense", 1500, time_budget=600.0), *search("ring", 90_000, time_budget=600.0),
        *search("fit", 70_000, time_budget=30.0, fit_only=True),
    ]  # fmt: skip
    found = {line["Implementation"]: line["Max tokens"] for line in texts(build(records), TITLE)}
    assert found["sdpa"] == "5,000"
    assert found["dense"] == "900"
    assert found["ring"] == "90,000 (10 min limit)"
    assert found["fit (fit only)"] == "70,000 (30 s limit)"
    assert section(build(records), TITLE).tables[0].title.endswith("; longest: 30 s limit")


def test_lines_beyond_the_first_screen_are_in_the_next_section() -> None:
    records = [single(f"a{i}", 1024, 0.1 * (12 - i)) for i in range(10)]
    document = build([*records, *search("last", 9000)])
    names = [f"a{9 - i}" for i in range(10)]
    assert [line["Implementation"] for line in rows(document, TITLE)] == names[:8]
    assert section(document, TITLE).tables[0].title.startswith("8 of 11 rows: One line per ")
    assert [line["Implementation"] for line in rows(document, ALL)] == [*names, "last"]
    assert ALL not in titles(build(records[:8]))


def test_figures_to_distrust_are_findings_and_have_their_rows() -> None:
    """Wrong outputs come first; the table has every row."""
    document = build(rich())
    first, advice, *_, second, third = section(document, TITLE).points
    assert advice.startswith("Exact attention passed up to 29,795 tokens (ring chunk 64 ×4: time)")
    assert first == "Wrong output, no speed is shown: sdpa at 9,000 tokens; see Failures."
    assert second.startswith("CUDA's allocator freed its cache and retried (thrashing): sdpa at 3,")
    assert (
        third
        == "Bytes sent differ from their formula: ring chunk 64 ×2 at 8k tokens; see Failures."
    )
    found = [r for r in rows(document, "Failures") if "Warning" in r]
    assert [(r["Implementation"], r["Tokens"]) for r in found] == [
        ("sdpa", 3000), ("ring chunk 64 ×2", 8192), ("ring chunk 64 ×2", 8192),
    ]  # fmt: skip
    assert "times: 3" in found[0]["Warning"]
    assert "rank 0 sent 1,001 B in a pass; the formula gives 1,000 B" in found[1]["Warning"]
    assert not section(build([single("sdpa", 1024, 0.1)]), TITLE).points


def test_a_search_that_was_interrupted_does_not_read_as_a_finished_one() -> None:
    bounded = build(search("ring", 5000))
    open_end = build(search("ring", 5000)[:1])
    assert [one.figures[0].words for one in (bounded, open_end)] == [
        "ring, stopped by memory, not confirmed by a second run",
        "ring, no longer length failed, not confirmed by a second run",
    ]
    assert [rows(one, "Longest lengths")[0]["Limited by"] for one in (bounded, open_end)] == [
        "memory", "unfinished",
    ]  # fmt: skip
