"""Charts: valid Vega-Lite, the drawn values, and the limits of what is drawn."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import altair

from longseq_bench.core.model import Record
from longseq_bench.reports.document import Axis, Chart, Guide, Mark, Point
from longseq_bench.reports.kinds import documents
from longseq_bench.reports.render._draw import (
    MAX_SERIES,
    PALE,
    PALETTE,
    colours,
    draw,
    notes,
    spec,
    svg,
)
from tests.reports import examples
from tests.reports.examples import rich, search

TOKENS, TIME = Axis("Tokens", "tokens", True), Axis("Time", "seconds", True)


def lines(*points: Point, **fields: Any) -> Chart:
    return Chart("time", "Of a workload", "Said.", TOKENS, TIME, points, **fields)


def rows(chart: Chart, mark: str, i: int = 0) -> list[dict[str, Any]]:
    """Data of the i-th layer with a mark."""
    drawn = spec(chart)
    layers = [layer for layer in drawn["layer"] if layer["mark"]["type"] == mark]
    data: list[dict[str, Any]] = drawn["datasets"][layers[i].get("data", drawn.get("data"))["name"]]
    return data


@cache
def all_charts() -> list[Chart]:
    return [
        c for d in documents(rich(), ["summary", "devices"]) for s in d.sections for c in s.charts
    ]


def test_every_chart_is_valid_vega_lite() -> None:
    """`spec` does not validate, because this takes long."""
    charts = {(c.shape, bool(c.failures), bool(c.guides), c.x.log): c for c in all_charts()}
    assert {shape for shape, *_ in charts} == {"lines", "bars"}
    for chart in (*charts.values(), ticked()):
        altair.Chart.from_dict(draw(chart).to_dict(), validate=True)


def test_values_intervals_and_failures_are_drawn() -> None:
    chart = lines(
        Point("a", 1024, 0.5, 0.4, 0.6), Point("a", 2048, 1.0),
        failures=(Mark("a", 4096, "oom in forward"), Mark("b", 1024, "wrong")),
        guides=(Guide("floor", (Point("", 1, 2.0), Point("", 2, 4.0))),),
    )  # fmt: skip
    one, two = rows(chart, "line")
    assert (one["x"], one["y"], one["lo"], one["hi"]) == (1024, 0.5, 0.4, 0.6)
    assert one["w"] == "a: Tokens 1k, Time 500 ms"
    assert (two["lo"], two["hi"]) == (None, None)
    assert [(m["s"], m["x"], m["w"]) for m in rows(chart, "point", 1)] == [
        ("a", 4096, "a: oom in forward"), ("b", 1024, "b: wrong"),
    ]  # fmt: skip
    assert chart.series == ["a", "b"]
    assert [row["y"] for row in rows(chart, "line", 1)] == [2.0, 4.0]


def test_series_that_are_not_drawn_are_counted() -> None:
    many = lines(*(Point(f"s{i}", 1024, 1.0) for i in range(MAX_SERIES + 5)))
    assert "Not drawn, to keep the chart readable: 5 of 37 series." in notes(many)
    assert len({row["s"] for row in rows(many, "line")}) == MAX_SERIES


# ---- what a reader sees --------------------------------------------------------------------------


def written(chart: Chart) -> list[str]:
    return re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", svg(chart))


def test_the_lines_that_reach_farthest_have_the_colours() -> None:
    """Of those that reach as far, the fastest; the others are grey and lie below."""
    points = [Point(f"far{i}", x, i + 1.0) for i in range(len(PALETTE) + 2) for x in (1024, 4096)]
    points += [Point(f"near{i}", x, 0.1) for i in range(3) for x in (1024, 2048)]
    chart = lines(*points)
    styles = colours(chart, {})
    coloured = [name for name, colour in styles.items() if colour != PALE]
    assert coloured == [f"far{i}" for i in range(len(PALETTE))]
    assert len({styles[name] for name in coloured}) == len(PALETTE)
    order = [row["s"] in coloured for row in rows(chart, "line")]
    assert order == sorted(order)
    assert "Pale grey: 5 further series." in notes(chart)
    best = replace(chart, y=Axis("Tokens/s", "count", True))
    assert colours(best, {})["far0"] == PALE


def test_a_series_has_one_colour_in_all_charts_of_a_report() -> None:
    def of(*names: str) -> Chart:
        return lines(*(Point(name, x, 1.0) for name in names for x in (1024, 2048)))

    known: dict[str, str] = {}
    first, second, third = (
        colours(of(*names), known) for names in ("ab", "cba", [*"hgfedc", "ring", "a"])
    )
    assert second == first | {"c": PALETTE[2]}
    assert (third["a"], third["c"]) == (first["a"], second["c"])
    assert len(set(third.values())) == len(third)


def test_a_failure_has_its_word() -> None:
    failures = Mark("a", 4096, "oom in forward"), Mark("b", 1024, "hang"), Mark("c", 1024, "no one")
    texts = written(lines(Point("a", 1024, 0.5), Point("a", 2048, 1.0), failures=failures))
    assert {"OOM", "hang"} <= set(texts)
    assert "no" not in texts


def ticked() -> Chart:
    """Bars of which each has the floor, and a failure."""
    points = Point("far", 0, 9e6), Point("near", 0, 9e4)
    failure = Mark("slow", 0, "no length passed, limited by time")
    guide = Guide("floor", (Point("far", 0, 9.3e6), Point("near", 0, 9.5e6)))
    x, y = Axis("", "text"), Axis("Max tokens", "tokens")
    return Chart("m", "M", "Said.", x, y, points, (failure,), (guide,), shape="bars")


def test_bars_have_ticks_and_failures() -> None:
    bars_, ticks, crosses = (rows(ticked(), mark) for mark in ("bar", "tick", "point"))
    assert [row["y"] for row in bars_] == [9e6, 9e4]
    assert [row["y"] for row in ticks] == [9.3e6, 9.5e6]
    assert [row["row"] for row in crosses] == ["slow"]
    assert "no length passed, limited by time" in written(ticked())
    assert "Grey tick: floor, computed, not measured." in notes(ticked())


# ---- failures with few passed trials -------------------------------------------------------------


def swept_charts(*records: Record) -> dict[str, Chart]:
    (document,) = documents(list(records))
    return {c.name: c for s in document.sections for c in s.charts}


def test_failures_are_drawn_if_only_one_length_passed() -> None:
    found = swept_charts(
        examples.single("sdpa", 1024, 0.01), examples.failed("oom", "sdpa", 2048),
        examples.failed("wrong", "bad", 1024), examples.failed("wrong", "bad", 2048),
    )  # fmt: skip
    assert set(found) == {"time", "memory"}
    assert not swept_charts(examples.failed("oom", "a", 1024), examples.failed("oom", "a", 2048))
    for one in found.values():
        assert one.shape == "lines"
        assert {(p.series, p.x) for p in one.points} == {("sdpa", 1024)}
        assert {(m.series, m.x) for m in one.failures} == {
            ("sdpa", 2048), ("bad", 1024), ("bad", 2048),
        }  # fmt: skip
        assert one.series == ["sdpa", "bad"]
    # both ends have their tick
    assert spec(found["time"])["encoding"]["x"]["axis"]["values"] == [1024, 2048]


def test_at_one_length_failures_are_next_to_the_bars() -> None:
    found = swept_charts(examples.single("sdpa", 1024, 0.01), examples.failed("wrong", "bad", 1024))
    one = found["time"]
    assert one.shape == "bars"
    (bar,), (cross,) = rows(one, "bar"), rows(one, "point")
    assert (bar["s"], cross["s"], cross["w"]) == ("sdpa", "bad", "bad: wrong at 1,024 tokens")
    assert svg(one).count("bad") > 1


# ---- longest lengths -----------------------------------------------------------------------------


def test_fit_only_and_in_place_maxima_have_charts_of_their_own() -> None:
    records = search("ring", 2_000_000, fit_only=True) + search("sdpa", 9000, keep="nothing")
    (document,) = documents([*records, *search("ring", 4000), *search("sdpa", 5000)])
    found = [chart for section in document.sections for chart in section.charts]
    assert [[p.y for p in chart.points] for chart in found] == [[5000, 4000], [2_000_000], [9000]]
