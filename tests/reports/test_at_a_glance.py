"""The first table of a summary: one line per implementation, recomputed from the records."""

from statistics import median
from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.document import Spread
from tests import make
from tests.reports.examples import MIB, failed, rich, single, sparser
from tests.reports.reading import build, rows, section, texts, titles

TITLE = "At a glance"


def implementation_of(line: dict[str, Any], records: list[Record]) -> str:
    """The implementation whose name begins the line; a pattern stands for block-sparse."""
    known = sorted({r.trial.implementation for r in records}, key=len, reverse=True)
    text = line["Implementation"]
    return next((name for name in known if text.startswith(name)), "block-sparse")


@pytest.mark.parametrize("records", [rich(), sparser()], ids=["rich", "sparser"])
def test_every_implementation_of_the_records_has_one_line(records: list[Record]) -> None:
    shown = [implementation_of(line, records) for line in rows(build(records), TITLE)]
    assert sorted(shown) == sorted({r.trial.implementation for r in records})
    assert titles(build(records))[0] == TITLE


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
    assert any("at 1k tokens" in text for text in section(build(records), TITLE).paragraphs)


def searched(name: str, best: int, **fields: Any) -> list[Record]:
    of = make.trial(name, 1, memory_budget=64 * MIB, repeats=0, **fields)
    return [make.step(best, of=of), make.step(best + 64, "oom", of=of, purpose="edge")]


def test_a_maximum_of_another_limit_names_it() -> None:
    records = [
        *searched("sdpa", 5000, time_budget=30.0), *searched("dense", 900, time_budget=30.0),
        *searched("dense", 1500, time_budget=600.0), *searched("ring", 90_000, time_budget=600.0),
        *searched("fit", 70_000, time_budget=30.0, fit_only=True),
    ]  # fmt: skip
    found = {line["Implementation"]: line["Longest"] for line in texts(build(records), TITLE)}
    assert found["sdpa"] == "5,000"
    assert found["dense"] == "900"
    assert found["ring"] == "90,000 (10 min limit)"
    assert found["fit"] == "—"
    about = " ".join(section(build(records), TITLE).paragraphs)
    assert "Longest: 30 s limit" in about


def test_a_variant_that_is_longest_but_not_fastest_is_named() -> None:
    slow, fast = {"chunk": 64}, {"chunk": 4096}
    records = [
        single("ring", 1024, 0.1, options=fast), single("ring", 1024, 0.2, options=slow),
        *searched("ring", 8000, options=slow), *searched("ring", 7000, options=fast),
    ]  # fmt: skip
    (line,) = texts(build(records), TITLE)
    assert line["Implementation"] == "ring chunk 4k"
    assert line["Longest"] == "8,000 (ring chunk 64)"
    assert line["Limited by"] == "memory"


def test_without_a_time_or_a_maximum_there_is_no_table() -> None:
    records = searched("ring", 8000, fit_only=True)
    assert TITLE not in titles(build(records))
