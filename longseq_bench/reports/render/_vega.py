"""Charts as Vega-Lite; vl-convert makes SVG of them without a browser.

One description makes both the picture of a Markdown report and the chart of an HTML page, so that
both show the same figures. Names of series are data in it, never part of an expression.
Formats import this module only to draw; the underscore keeps the registry from importing it.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import wrap
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from longseq_bench.reports.document import Chart, Point
from longseq_bench.reports.render._vega_parts import (
    CROSS,
    GREY,
    LETTER,
    LINE,
    MAX_POINTS,
    PALE,
    SHAPES,
    TIP,
    Datasets,
    binary_ticks,
    clean,
    colours,
    decimal_ticks,
    failure_word,
    has_rows,
    label_expression,
    named_data,
    point_row,
    printable,
    shown_series,
)
from longseq_bench.reports.render._vega_rows import draw_bars, draw_heat

WIDTH, HEIGHT, PADDING = 620, 320, 12
NARROW = 480
"""Width of a plot (px) below which names at line ends are cut to NARROW_SHARE of it."""
NARROW_SHARE = 0.4
TITLE_LETTERS = 95
"""Letters of a line of a picture's title."""
MAX_TICKS = 9
"""Maximum number of lengths or ranks for which each gets its own tick."""


def svg(chart: Chart) -> str:
    """Draw a chart on white with its title, and with its description for screen readers."""
    import vl_convert

    whole = spec(chart)
    title = wrap(printable(chart.title), TITLE_LETTERS)
    outside: dict[str, Any] = {"width": WIDTH, "title": title, "background": "white", "padding": 8}
    # a plot that zooms has clips, whose ids would differ from picture to picture
    outside["params"] = [param for param in whole["params"] if param["name"] != "zoom"]
    return str(vl_convert.vegalite_to_svg(whole | outside))


_unchecked = debug_mode(False)
"""Altair checks each part against the schema when it is made; a test checks the whole."""


@_unchecked
def spec(chart: Chart) -> dict[str, Any]:
    """Return a chart as Vega-Lite, as wide as its container and without its title.

    Its parameter `hidden` lists the series that are not shown.
    """
    chart, datasets = clean(chart), Datasets()
    draw = {"bars": draw_bars, "heat": draw_heat}.get(chart.shape, _plot)
    layers, height = draw(chart, datasets)
    params: list[dict[str, Any]] = [{"name": "hidden", "value": []}]
    parts = [_layer(layer) for layer in layers]
    if draw is _plot:
        parts[0]["name"] = "plot"
        select = {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"}
        params.append({"name": "zoom", "select": select, "bind": "scales", "views": ["plot"]})
    # written here, because Altair copies all layers again at each step
    return {
        "$schema": alt.SCHEMA_URL, "description": chart.description,
        "width": "container", "height": height, "params": params, "layer": parts,
        "config": {"title": {"anchor": "start", "limit": 0}, "view": {"stroke": None}},
        "datasets": datasets,
    }  # fmt: skip


def as_altair(chart: Chart, width: int) -> alt.LayerChart:
    """Return a chart for a notebook, with its title. width: of the plot (px)."""
    title = wrap(printable(chart.title), TITLE_LETTERS)
    found = alt.LayerChart.from_dict(spec(chart) | {"width": width, "title": title}, validate=False)
    assert isinstance(found, alt.LayerChart)
    return found


def _layer(layer: alt.Chart) -> dict[str, Any]:
    """Return a layer as Vega-Lite, without the rows of hidden series."""
    part: dict[str, Any] = layer.to_dict(validate=False, context={"top_level": False})
    part["transform"] = [*part.get("transform", ()), {"filter": "indexof(hidden, datum.s) < 0"}]
    return part


@_unchecked
def axes(chart: Chart) -> dict[str, dict[str, dict[str, Any]]]:
    """Return scale and labels, "linear" and "log", of the axes ("x", "y") that allow both."""
    chart = clean(chart)
    ends = {"x": [p.x for p in chart.points], "y": [p.y for p in chart.points]}
    ends["y"] += [p.low for p in chart.points if p.low is not None]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, values in ends.items():
        if not has_rows(chart) and values and min(values) > 0:
            for scale in ("linear", "log"):
                axis = replace(getattr(chart, name), log=scale == "log")
                channel = _axis(name, replace(chart, **{name: axis})).to_dict()
                parts = {part: channel[part] for part in ("scale", "axis")}
                found.setdefault(name, {})[scale] = parts
    return found


def count_left_out(chart: Chart) -> int:
    """Return the number of series above MAX_SERIES, which are not drawn."""
    return len(chart.series) - len(shown_series(chart))


def notes(chart: Chart) -> Iterator[str]:
    """Yield sentences on the marks of a chart, and on series and points that it leaves out."""
    if chart.shape == "heat":
        yield f"Darker: higher {chart.y.name.lower()}."
    elif chart.shape == "bars":
        for guide in chart.guides:
            yield f"Grey tick: {', '.join(dict.fromkeys((guide.name, guide.description)))}."
        if len(chart.facets) > 1:
            yield "Each group of bars has its own scale."
    else:
        yield from _notes_on_lines(chart)
    yield from _explain_names(chart.series)
    if more := count_left_out(chart):
        yield f"Not drawn, to keep the chart readable: {more} of {len(chart.series)} series."
    if len(chart.points) > MAX_POINTS:
        yield f"Only the first {MAX_POINTS:,} of {len(chart.points):,} points are drawn."


def _explain_names(names: Sequence[str]) -> Iterator[str]:
    """Explain the marks "×2" and "#1" at the ends of names."""
    for pattern, words in _MARKS:
        found = (pattern.search(name) for name in names)
        if first := next(filter(None, found), None):
            yield words.format(first[1])


_MARKS = (
    (re.compile(r" ×(\d+)$"), "×{0}: on {0} ranks."),
    (re.compile(r" #(\d+)( ×\d+)?$"), "#{}: options in How each ran."),
)


def _notes_on_lines(chart: Chart) -> Iterator[str]:
    if chart.failures:
        meaning = "a length that failed" if chart.x.kind == "tokens" else "no length passed"
        yield f"× at the top: {meaning}; see Failures."
    if chart.guides:
        yield f"Dashed grey: {'; '.join(dict.fromkeys(g.description for g in chart.guides))}."
    if grey := list(colours(chart).values()).count(PALE):
        yield f"Pale grey: {grey} further series."


def _plot(chart: Chart, datasets: Datasets) -> tuple[list[alt.Chart], int]:
    """Draw lines or dots with intervals, and a cross at the top for each failed length.

    Grey series lie below those in colour.
    """
    x, y = _axis("x", chart), _axis("y", chart)
    colour, shape = _scales(chart)
    base = named_data(_rows(chart), datasets).encode(x=x, color=colour)
    dots = base.mark_point(filled=True, size=46, opacity=1).encode(y=y, shape=shape, tooltip=TIP)
    bounds = base.mark_rule(strokeWidth=1.5, opacity=0.7).encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi:Q"))
    layers = [dots, bounds.transform_filter("isValid(datum.lo)")]
    if chart.shape == "lines":
        layers.insert(0, base.mark_line(strokeWidth=1.8).encode(y=y, detail=alt.Detail("s:N")))
    # without `sort` Vega-Lite writes the names into an expression
    offset = alt.YOffset("row:Q", scale=None, sort="ascending")
    crosses = _crosses(chart, datasets, x=x, y=alt.value(0), yOffset=offset, color=colour)
    layers += [*crosses, *_guides(chart, datasets)]
    return [*layers, _end_labels(chart, datasets, x=x, y=y, color=colour)], HEIGHT


def _named_ends(chart: Chart) -> list[Point]:
    """Return the last point of each series in colour."""
    styles, ends = colours(chart), dict[str, Point]()
    for p in chart.points:
        if styles[p.series] != PALE and (p.series not in ends or p.x >= ends[p.series].x):
            ends[p.series] = p
    return list(ends.values())


def _end_labels(chart: Chart, datasets: Datasets, **encoding: Any) -> alt.Chart:
    """Write the name of each series in colour at its last point; a narrow plot cuts long names.

    Names at nearly equal heights are moved apart, so that all of them can be read.
    """
    last = _named_ends(chart)
    wanted = [_height(chart, p.y) for p in last]
    moves = [placed - height for placed, height in zip(_separate(wanted), wanted, strict=True)]
    rows = [
        {"s": p.series, "x": p.x, "y": p.y, "move": move}
        for p, move in zip(last, moves, strict=True)
    ]
    move = alt.ExprRef(expr="datum.move")
    limit = alt.ExprRef(expr=f"width < {NARROW} ? {NARROW_SHARE} * width - 10 : 0")  # 0: none
    base = named_data(rows, datasets).encode(**encoding, text=alt.Text("s:N"))
    names: alt.Chart = base.mark_text(align="left", dx=8, dy=move, limit=limit)
    return names


def _height(chart: Chart, value: float) -> float:
    """Return the distance of a value from the top of the plot (px), as `_axis` places it."""
    values, top = [p.y for p in chart.points], max(_cross_rows(chart).values(), default=0)
    log = chart.y.log and min(values) > 0
    low, high, at = (math.log(v) if log else v for v in (min(values), max(values), value))
    room = HEIGHT - top - 2 * PADDING
    share = (at - low) / (high - low) if high > low else 0.5
    return HEIGHT - PADDING - share * room


def _separate(heights: list[float]) -> list[float]:
    """Return heights of lines of text that do not overlap, in the order of those wanted."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + LINE)
    # the last ones are below the plot
    if order and (over := placed[order[-1]] - (HEIGHT - LINE // 2)) > 0:
        placed[order[-1]] -= over
        for below, above in pairwise(reversed(order)):
            placed[above] = min(placed[above], placed[below] - LINE)
    return placed


def _crosses(chart: Chart, datasets: Datasets, **encoding: Any) -> list[alt.Chart]:
    """Draw a cross and its word for each failure; those at one length are one below the other."""
    rows = _cross_rows(chart)
    failures = [m for m in chart.failures if m.series in rows][:MAX_POINTS]
    if not failures:
        return []
    # with more series than rows several crosses are at one place; the last one has all words
    words: dict[tuple[float, int], dict[str, str]] = {}
    for m in failures:
        words.setdefault((m.x, rows[m.series]), {})[failure_word(m)] = m.series
    texts = {
        (found[word], *place): "/".join(filter(None, found))
        for place, found in words.items()
        for word in list(found)[-1:]
    }
    marks = [
        {"s": m.series, "x": m.x, "row": rows[m.series], "w": f"{m.series}: {m.words}",
         "word": texts.get((m.series, m.x, rows[m.series]), "")}
        for m in failures
    ]  # fmt: skip
    base = named_data(marks, datasets).encode(**encoding, tooltip=TIP)
    crosses = base.mark_point(shape=CROSS, size=50, strokeWidth=2, opacity=1)
    return [crosses, base.mark_text(align="left", dx=7, fontSize=9).encode(text=alt.Text("word:N"))]


def _cross_rows(chart: Chart) -> dict[str, int]:
    """Return the distance of each series' crosses from the top (px)."""
    shown, failed = set(shown_series(chart)), dict.fromkeys(m.series for m in chart.failures)
    return {s: 6 + 8 * (i % 8) for i, s in enumerate(s for s in failed if s in shown)}


def _guides(chart: Chart, datasets: Datasets) -> list[alt.Chart]:
    """Draw guides as dashed lines with their names at the ends."""
    lines = []
    for guide in chart.guides:
        rows = [{"x": p.x, "y": p.y, "s": guide.name} for p in guide.points]
        base = named_data(rows, datasets).encode(x=alt.X("x:Q"), y=alt.Y("y:Q"))
        lines.append(base.mark_line(strokeDash=[4, 4], color=GREY, strokeWidth=1.5))
        last = named_data(rows[-1:], datasets).encode(
            x=alt.X("x:Q"), y=alt.Y("y:Q"), text=alt.Text("s:N")
        )
        lines.append(last.mark_text(align="right", dy=-7, color=GREY))
    return lines


def _rows(chart: Chart) -> list[dict[str, Any]]:
    """Return a row per point; grey series first, so that those in colour are drawn over them."""
    styles = colours(chart)
    return [
        point_row(chart, p) for p in sorted(chart.points, key=lambda p: styles[p.series] != PALE)
    ]


def _axis(name: str, chart: Chart) -> Any:
    """Return the channel of "x" or "y" with its scale and labels."""
    is_x = name == "x"
    axis, values = getattr(chart, name), [getattr(p, name) for p in chart.points]
    scale: dict[str, Any] = {"type": "linear", "zero": False, "nice": False, "padding": PADDING}
    if axis.log and values and min(values) > 0:
        scale |= {"type": "log", "base": 2 if axis.kind == "tokens" else 10}
        del scale["zero"]
    crosses = _cross_rows(chart)
    if is_x and (names := [len(p.series) for p in _named_ends(chart)]):
        room = LETTER * max(names) + 16  # for the names of lines at their ends
        cut = f"min({room}, width < {NARROW} ? {NARROW_SHARE} * width : width)"
        scale["range"] = [0, {"expr": f"width - {cut}"}]
    if crosses and not is_x:
        # below the crosses, because a cross on a point would seem to belong to that point
        scale["range"] = [HEIGHT, max(crosses.values())]
    words = label_expression(axis.kind, log=scale["type"] == "log")
    label = alt.Axis(labelExpr=words, title=axis.name, labelOverlap=True)
    if crosses and is_x:
        label.grid = False  # grid lines are as long as the range of y, so they would miss the axis
    tried = sorted({*values, *(m.x for m in chart.failures if is_x)})
    exact = tried if len(tried) <= MAX_TICKS else sorted(set(values))
    if axis.kind in ("tokens", "count") and is_x and len(exact) <= MAX_TICKS:
        label.values = exact
    elif scale["type"] == "log" and axis.kind in ("tokens", "bytes"):
        # powers of two among and next to the values
        first, last = math.ceil(math.log2(min(values))), math.floor(math.log2(max(values)))
        powers = [2**i for i in range(max(first - 1, 0), last + 2)]
        label.values = powers if first < last else alt.Undefined
    elif axis.kind == "bytes" and values:
        label.values = binary_ticks(min(values), max(values))
    elif scale["type"] == "log":
        label.values = decimal_ticks(min(values), max(values))
    channel = alt.X if is_x else alt.Y
    return channel(f"{name}:Q", scale=alt.Scale(**scale), axis=label)


def _scales(chart: Chart) -> tuple[Any, Any]:
    """Return colour and shape of the series, the same in every layer."""
    styles = colours(chart)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(styles))]
    return (
        alt.Color(
            "s:N", scale=alt.Scale(domain=list(styles), range=list(styles.values())), legend=None
        ),
        alt.Shape("s:N", scale=alt.Scale(domain=list(styles), range=shapes), legend=None),
    )
