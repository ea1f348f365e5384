"""Charts: the schema that they keep, what of their rows they draw, and how they are cut short."""

from __future__ import annotations

from typing import Any

import altair
import pytest

from longseq_bench.reports import documents
from longseq_bench.reports.charts import MOST_POINTS, MOST_SERIES, left_out, spec, svg
from longseq_bench.reports.document import Axis, Chart, Guide, Mark, Point
from longseq_bench.reports.drawn import MOST_CHARTS, cut
from longseq_bench.table import sweep_rows
from tests import make
from tests.reports.made import rich

TOKENS, TIME = Axis("Tokens", "tokens", True), Axis("Time", "seconds", True)


def lines(*points: Point, **fields: Any) -> Chart:
    return Chart("time", "Of a workload", "Said.", TOKENS, TIME, points, **fields)


def rows(chart: Chart, i: int = 0) -> list[dict[str, Any]]:
    return list(spec(chart, page=True)["datasets"].values())[i]


def all_charts() -> list[Chart]:
    return [c for d in documents(rich(), ["all"]) for s in d.sections for c in s.charts]


@pytest.mark.parametrize("page", [True, False])
def test_every_chart_keeps_the_schema(page: bool) -> None:
    """It is not checked where it is made, which takes long."""
    charts = {(c.name, c.shape, bool(c.failures), bool(c.guides)): c for c in all_charts()}
    assert {shape for _, shape, _, _ in charts} == {"lines", "bars", "dots"}
    for chart in charts.values():
        made = altair.Chart.from_dict(spec(chart, page), validate=True)
        assert made.to_dict(validate=True)["datasets"]


def test_a_wrong_chart_would_not_keep_it() -> None:
    broken = spec(all_charts()[0], page=True)
    broken["layer"][0]["mark"] = {"type": "no mark"}
    with pytest.raises(Exception, match="no mark"):
        altair.Chart.from_dict(broken, validate=True).to_dict(validate=True)


def test_figures_intervals_and_failures_are_drawn_as_they_are() -> None:
    chart = lines(
        Point("a", 1024, 0.5, 0.4, 0.6), Point("a", 2048, 1.0),
        failures=(Mark("a", 4096, "oom in forward"), Mark("b", 1024, "wrong")),
        guides=(Guide("floor", (Point("", 1, 2.0), Point("", 2, 4.0))),),
    )  # fmt: skip
    one, two = rows(chart)
    assert (one["x"], one["y"], one["lo"], one["hi"]) == (1024, 0.5, 0.4, 0.6)
    assert one["w"] == "a: Tokens 1k, Time 500 ms"
    assert (two["lo"], two["hi"]) == (None, None)
    failed = rows(chart, 1)
    assert [(m["s"], m["x"], m["w"]) for m in failed] == [
        ("a", 4096, "a: oom in forward"), ("b", 1024, "b: wrong"),
    ]  # fmt: skip
    assert chart.series == ["a", "b"]
    assert [row["y"] for row in rows(chart, 2)] == [2.0, 4.0]


def test_a_picture_says_its_names_and_no_more() -> None:
    text = svg(lines(Point("a<script>|b", 1024, 0.5), Point("a<script>|b", 2048, 1.0)))
    assert "a&lt;script&gt;|b" in text
    assert "<script" not in text
    assert text.startswith("<svg")


def test_what_there_is_no_room_for_is_counted() -> None:
    many = lines(*(Point(f"s{i}", 1024, 1.0) for i in range(MOST_SERIES + 5)))
    assert left_out(many) == 5
    assert len({row["s"] for row in rows(many)}) == MOST_SERIES
    long = lines(*(Point("s", i + 1, 1.0) for i in range(MOST_POINTS + 10)))
    assert len(rows(long)) == MOST_POINTS


def test_charts_of_workloads_that_are_not_drawn_are_said() -> None:
    records = [
        make.record(make.trial("sdpa", 1024 * k, heads=h))
        for h in range(1, MOST_CHARTS + 3)
        for k in (1, 2)
    ]
    found = sweep_rows(records)
    assert cut(found) == [
        f"Charts are of the first {MOST_CHARTS} of {MOST_CHARTS + 2} workloads; the tables have "
        "all."
    ]
    assert cut(found[:4]) == []
    (document,) = documents(records)
    swept = next(s for s in document.sections if s.title == "Lengths swept")
    assert len(swept.charts) <= MOST_CHARTS
    assert len(swept.tables) == MOST_CHARTS + 2
    assert any("Charts are of the first 4 of 14" in said for said in swept.paragraphs)
