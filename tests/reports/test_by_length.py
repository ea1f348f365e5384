"""The first table of a summary of several workloads: the best of each length of one shape."""

from statistics import median

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.document import Spread
from longseq_bench.reports.sections.at_a_glance import ALL
from tests import make
from tests.reports.examples import dense_flops, single, timings
from tests.reports.reading import build, rows, section, titles

TITLE = "Answer"


def sparse(
    name: str, tokens: int, time: float, pairs: float, dense: float, **more: object
) -> Record:

    flops = pairs * dense_flops(make.trial(name, tokens).workload)
    return single(
        name, tokens, time, density_achieved=pairs, density_asked=pairs, flops=flops,
        dense_time=[dense], facts={"dense": "measured"}, **more,
    )  # fmt: skip


def two_sweeps() -> list[Record]:
    """One shape at 1k and 2k under one budget, at 2k and 8k under another; a third one, causal."""
    short, long = {"time_budget": 20.0}, {"time_budget": 30.0}
    return [
        single("sdpa", 1024, 0.1, **short), single("sdpa", 2048, 0.4, **short),
        single("ring", 1024, 0.3, **short), single("ring", 2048, 0.2, **short, peak=1000),
        single("sdpa", 2048, 0.41, **long), single("sdpa", 8192, 6.0, n=1, **long),
        sparse("blocks", 8192, 0.5, 0.1, 4.0, **long), sparse("thin", 8192, 0.4, 0.01, 2.0, **long),
        *(single(name, 1024, 0.05, causal=True) for name in ("sdpa", "ring", "a", "b")),
    ]  # fmt: skip


def over_dense(records: list[Record]) -> str:
    """The speeds of the two sparse rows over dense attention."""
    thick, thin = (
        dense / median(record.outcome.samples("time"))
        for record, dense in zip(records[6:8], (4.0, 2.0), strict=True)
    )
    return f"{thin:.3g}× to {thick:.3g}×"


def test_lines_are_the_lengths_of_the_shape_that_has_most() -> None:
    records = two_sweeps()
    document = build(records)
    lines = rows(document, TITLE)
    assert [line["Tokens"] for line in lines] == [1024, 2048, 8192]
    assert [line["Fastest exact"] for line in lines] == ["sdpa", "ring", "sdpa"]
    assert [line["Fastest sparse"] for line in lines] == [None, None, "thin"]
    for line, record in zip(lines[:2], (records[0], records[3]), strict=True):
        time = line["Time, exact"]
        assert isinstance(time, Spread)
        assert time.value == pytest.approx(median(record.outcome.samples("time")))
    assert str(lines[2]["Time, exact"]).endswith(" s (one pass)")
    assert lines[2]["Pairs seen"] == pytest.approx(0.01)
    assert lines[2]["Over dense"] == over_dense(records)
    assert lines[1]["Least memory"] == "1000 B, ring"
    assert document.paragraphs[1].startswith("Table and chart: not causal")
    assert ALL in titles(document)


def test_the_chart_has_the_attention_that_is_the_fastest_somewhere() -> None:
    late = make.record(make.trial("ring", 8192, time_budget=30.0), make.outcome("timeout"))
    (chart,) = section(build([*two_sweeps(), late]), TITLE).charts
    found = {(point.series, point.x) for point in chart.points}
    assert found == {
        *(("sdpa", n) for n in (1024, 2048, 8192)), ("ring", 1024), ("ring", 2048), ("thin", 8192)
    }  # fmt: skip
    assert [(mark.series, mark.x) for mark in chart.failures] == [("ring", 8192)]


def test_an_output_with_zeros_is_not_the_fastest() -> None:
    zeros = sparse("holes", 8192, 0.1, 0.01, 4.0, uncovered=0.5, time_budget=30.0)
    line = rows(build([*two_sweeps(), zeros]), TITLE)[2]
    assert line["Fastest sparse"] == "thin"


def test_single_passes_have_no_winner() -> None:
    slower = single("ring", 8192, 7.0, n=1, time_budget=30.0)
    line = rows(build([*two_sweeps(), slower]), TITLE)[2]
    assert line["Fastest exact"] == "sdpa, 1 more"
    assert str(line["Time, exact"]).startswith("from 5.9")


def test_times_that_do_not_differ_are_joined() -> None:
    same = single("collective", 1024, 0.1, time_budget=20.0)
    found = rows(build([same, *two_sweeps()]), TITLE)[0]["Fastest exact"]
    assert found == "collective ≈ 1 more"


def test_a_computed_dense_time_is_marked() -> None:
    records = two_sweeps()
    part = records[7].outcome.model_copy(update={"facts": {"dense": "computed from 9 rows"}})
    records[7] = records[7].model_copy(update={"outcome": part})
    table = section(build(records), TITLE).tables[0]
    assert table.title.endswith("; †: dense time partly computed")
    assert f"{over_dense(records)}†" in table.rows[2]


def test_one_workload_keeps_a_line_per_implementation() -> None:
    records = [single(name, n, 0.1, time_budget=9.0) for name in ("a", "b") for n in (1024, 2048)]
    assert [line["Implementation"] for line in rows(build(records), TITLE)] == ["a", "b"]


def test_two_ranks_are_compared_with_one() -> None:
    trials = [make.trial(name, 2048, world_size=2, time_budget=20.0) for name in ("sdpa", "ring")]
    several = [make.record(trial, timings(trial, 0.25)) for trial in trials]
    document = build([*two_sweeps(), *several])
    (figure,) = [one for one in document.figures if one.label == "Two ranks over one"]
    slowest_rank = 0.25 * 1.01
    low, high = 0.2 / slowest_rank, 0.4 / slowest_rank
    assert figure.value == f"{low:.3g}× to {high:.3g}× the speed"
