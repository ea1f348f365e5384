"""Charts drawn by Altair: the chart of a notebook, of an HTML page, and the picture of Markdown.

One drawing serves all of them, so that they show the same figures. Names of series are data in it,
never part of an expression. Formats import this module only to draw; the underscore keeps the
registry from importing it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import fill, wrap
from typing import Any, get_args

import altair as alt
from altair.utils.schemapi import debug_mode

from longseq_bench.core.model import Status
from longseq_bench.reports.document import Axis, Chart, Mark, Point, format_cell
from longseq_bench.reports.render._theme import (
    BAR,
    CELL_COLOURS,
    CONFIG,
    CROSS,
    GREY,
    HEIGHT,
    LETTER,
    LINE,
    MAX_SERIES,
    MAX_TICKS,
    PADDING,
    PALE,
    PALETTE,
    SHAPES,
    WIDTH,
    colours,
    label_expression,
    round_ticks,
)

NAME_LETTERS, NAME_LINES, TITLE_LETTERS = 27, 3, 95
"""Letters of a line of a row's name, its lines, and letters of a line of a title."""
NAMES_SHARE = 0.4
"""Most of the width of a plot that names at the ends of lines take."""
DIGITS = 5
"""Length of the number before the name of a row or column, by which they are ordered."""
TIP = [alt.Tooltip("w:N", title=" ")]

Row = dict[str, Any]


def draw(chart: Chart, styles: dict[str, str] | None = None) -> alt.LayerChart:
    """Return a chart with its title, as wide as its container.

    styles: colours of its series, from `colours`; None: those of a chart alone.
    """
    styles = styles or colours(chart, {})
    points = [p for p in chart.points if p.series in styles and math.isfinite(p.x + p.y)]
    failures = dict.fromkeys(m for m in chart.failures if m.series in styles)
    build = {"bars": _bars, "heat": _cells}.get(chart.shape, _lines)
    drawn = build(replace(chart, points=tuple(points), failures=tuple(failures)), styles)
    title, text = wrap(chart.title, TITLE_LETTERS), chart.description
    return drawn.properties(width="container", title=title, description=text, config=CONFIG)


@debug_mode(False)  # else Altair checks each part when it is made; a test checks the whole
def spec(chart: Chart, styles: dict[str, str] | None = None) -> dict[str, Any]:
    """Return `draw` as Vega-Lite with printable texts: vl-convert ends the process on others."""
    found: dict[str, Any] = printable(draw(chart, styles).to_dict(validate=False))
    return found


def svg(chart: Chart, styles: dict[str, str] | None = None) -> str:
    """Return a picture on white with its title, and with its description for screen readers."""
    import vl_convert

    outside = {"width": WIDTH, "background": "white", "padding": 8}
    return str(vl_convert.vegalite_to_svg(spec(chart, styles) | outside))


def printable(value: Any) -> Any:
    """Return the same data without control characters in its texts."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else " " for c in value)
    if isinstance(value, dict):
        return {name: printable(one) for name, one in value.items()}
    return [printable(one) for one in value] if isinstance(value, list) else value


def notes(chart: Chart) -> Iterator[str]:
    """Yield sentences on the marks of a chart, and on series that it leaves out."""
    if chart.has_rows:
        if chart.shape == "heat":
            yield f"Darker: higher {chart.y.name.lower()}."
        for guide in chart.guides:
            yield f"Grey tick: {', '.join(dict.fromkeys((guide.name, guide.description)))}."
        if chart.shape == "bars" and len(chart.facets) > 1:
            yield "Each group of bars has its own scale."
    else:
        yield from _notes_on_lines(chart)
    for mark, words in _MARKS:
        if found := next(filter(None, map(mark.search, chart.series)), None):
            yield words.format(found[1])
    if more := len(chart.series[MAX_SERIES:]):
        yield f"Not drawn, to keep the chart readable: {more} of {len(chart.series)} series."


def _notes_on_lines(chart: Chart) -> Iterator[str]:
    if chart.failures:
        meaning = "a length that failed" if chart.x.kind == "tokens" else "no length passed"
        yield f"× at the top: {meaning}; see Failures."
    if chart.guides:
        yield f"Dashed grey: {'; '.join(dict.fromkeys(g.description for g in chart.guides))}."
    if more := len(chart.series[chart.colours : MAX_SERIES]):
        yield f"Pale grey: {more} further series."


_MARKS = (
    (re.compile(r" ×(\d+)$"), "×{0}: on {0} ranks."),
    (re.compile(r" #(\d+)( ×\d+)?$"), "#{}: options in How each ran."),
)
"""Ends of names, and what they mean."""


# ---- rows of data --------------------------------------------------------------------------------


def _of(rows: Iterable[Row]) -> alt.Chart:
    return alt.Chart({"values": list(rows)})


def _row(chart: Chart, p: Point) -> Row:
    """Return a point as a row of data, with its value as text and the words of its tooltip."""
    at = "" if chart.shape == "bars" else f"{chart.x.name} {_format_x(p.x, chart.x)}"
    value = format_cell(p.y, chart.y.kind)
    words = ", ".join(filter(None, (at, f"{chart.y.name} {value}", p.words)))
    text = {"value": value, "w": f"{p.series}: {words}" if p.series else words}
    return {"s": p.series, "x": p.x, "y": p.y, "lo": p.low, "hi": p.high} | text


def _failure(m: Mark, other: str = "") -> Row:
    """Return a failure as a row of data; `word` is its status (OOM, timeout), or the other word."""
    status = re.split(r"[ ,]", m.words, maxsplit=1)[0]
    word = status.replace("oom", "OOM") if status in get_args(Status) else other
    return {"s": m.series, "x": m.x, "word": word, "w": f"{m.series}: {m.words}"}


def _format_x(x: float, axis: Axis) -> str:
    """Format a value along x; shares have as many digits as they need."""
    return f"{x * 100:g} %" if axis.kind == "share" else format_cell(x, axis.kind)


# ---- lines and dots ------------------------------------------------------------------------------


def _lines(chart: Chart, styles: dict[str, str]) -> alt.LayerChart:
    """Draw lines or dots with intervals, guides, and a cross at the top for each failed length."""
    # those in colour lie over the grey ones
    points = sorted(chart.points, key=lambda p: styles[p.series] != PALE)
    shapes = [
        SHAPES[PALETTE.index(c) % len(SHAPES)] if c != PALE else SHAPES[0] for c in styles.values()
    ]
    scale = alt.Scale(domain=list(styles), range=list(styles.values()))
    colour = alt.Color("s:N", scale=scale, legend=None)
    shape = alt.Shape("s:N", scale=alt.Scale(domain=list(styles), range=shapes), legend=None)
    base = _of(_row(chart, p) for p in points).encode(color=colour)
    bounds = base.transform_filter("isValid(datum.lo)").encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi:Q"))
    layers = [
        base.mark_point(filled=True, size=46, opacity=1).encode(shape=shape, tooltip=TIP),
        bounds.mark_rule(strokeWidth=1.5, opacity=0.7),
    ]
    if chart.shape == "lines":
        layers.insert(0, base.mark_line(strokeWidth=1.8).encode(detail=alt.Detail("s:N")))
    top = 0
    if chart.failures:
        crosses = _cross_rows(chart)
        top = max(row["row"] for row in crosses)
        failed = _of(crosses).encode(y=alt.Y("row:Q", scale=None), color=colour, tooltip=TIP)
        layers += [
            failed.mark_point(shape=CROSS, size=50, strokeWidth=2, opacity=1),
            failed.mark_text(align="left", dx=7, fontSize=9).encode(text="word:N"),
        ]
    for guide in chart.guides:
        line = [_row(chart, p) | {"s": guide.name} for p in guide.points]
        layers += [
            _of(line).mark_line(strokeDash=[4, 4], color=GREY, strokeWidth=1.5),
            _of(line[-1:]).mark_text(align="right", dy=-7, color=GREY).encode(text="s:N"),
        ]
    ends = _name_ends(chart, styles, HEIGHT - top)
    names = _of(ends).encode(color=colour, text="s:N")
    limit, move = alt.ExprRef(f"{NAMES_SHARE} * width - 10"), alt.ExprRef("datum.move")
    layers.append(names.mark_text(align="left", limit=limit, dx=8, dy=move))
    room = LETTER * max((len(row["s"]) for row in ends), default=0) + 16
    right = {"expr": f"width - min({room}, {NAMES_SHARE} * width)"}
    x, y = _channel(chart, "x", [0, right]), _channel(chart, "y", [HEIGHT, top])
    return alt.layer(*layers).encode(x=x, y=y).properties(height=HEIGHT)


def _values(chart: Chart, name: str) -> list[float]:
    """Return the values of points and guides along "x" or "y"."""
    every = [*chart.points, *(p for guide in chart.guides for p in guide.points)]
    return [getattr(p, name) for p in every]


def _channel(chart: Chart, name: str, ends: list[Any]) -> Any:
    """Return the channel of "x" or "y", with its scale, ticks and labels.

    Of few lengths or ranks each has a tick, also if it failed.
    """
    axis, values = getattr(chart, name), _values(chart, name)
    is_log = axis.log and min(values, default=0) > 0
    more: Row = {"base": 2 if axis.kind == "tokens" else 10} if is_log else {"zero": False}
    tried = {*values, *(m.x for m in chart.failures)}
    exact = sorted(tried if len(tried) <= MAX_TICKS else set(values))
    is_exact = name == "x" and axis.kind in ("tokens", "count") and len(exact) <= MAX_TICKS
    ticks = exact if is_exact else round_ticks(axis.kind, is_log, values)
    label = alt.Axis(
        title=axis.name,
        labelExpr=label_expression(axis.kind),
        labelOverlap=True,
        values=ticks or alt.Undefined,
        # lines of x are as long as the range of y, so below crosses they would miss the axis
        grid=name == "y" or not chart.failures,
    )
    scale = alt.Scale(
        type="log" if is_log else "linear", nice=False, padding=PADDING, range=ends, **more
    )
    return (alt.X if name == "x" else alt.Y)(f"{name}:Q", scale=scale, axis=label)


def _cross_rows(chart: Chart) -> list[Row]:
    """Return a row per failure; those at one length are one below the other, `row` px from the top.

    With more series than rows several crosses are at one place; the last one has the word.
    """
    failed = list(dict.fromkeys(m.series for m in chart.failures))
    rows = [_failure(m) | {"row": 6 + 8 * (failed.index(m.series) % 8)} for m in chart.failures]
    last = {(row["x"], row["row"]): row for row in rows}
    return [row if row is last[row["x"], row["row"]] else row | {"word": ""} for row in rows]


def _name_ends(chart: Chart, styles: dict[str, str], height: int) -> list[Row]:
    """Return the last point of each series in colour; `move` (px) keeps their names apart."""
    ends: dict[str, Point] = {}
    for p in sorted(chart.points, key=lambda p: p.x):
        if styles[p.series] != PALE:
            ends[p.series] = p
    values = _values(chart, "y")
    scale = math.log if chart.y.log and min(values, default=0) > 0 else float
    low, high = (scale(end(values, default=1)) for end in (min, max))
    room = height - 2 * PADDING
    places = [(scale(p.y) - low) / ((high - low) or 1) * room for p in ends.values()]
    moved = zip(ends.values(), places, _separate(places), strict=True)
    return [{"s": p.series, "x": p.x, "y": p.y, "move": at - placed} for p, at, placed in moved]


def _separate(places: Sequence[float]) -> list[float]:
    """Return places of lines of text that do not overlap, in the order of those wanted."""
    order = sorted(range(len(places)), key=places.__getitem__, reverse=True)
    placed = list(places)
    for above, below in pairwise(order):
        placed[below] = min(placed[below], placed[above] - LINE)
    lowest = LINE / 2 - PADDING  # those that are below the plot go up
    for i in reversed(order):
        placed[i] = max(placed[i], lowest)
        lowest = placed[i] + LINE
    return placed


# ---- bars and heat maps, whose series are rows with names ----------------------------------------


def _in_rows(chart: Chart, layers: Sequence[alt.Chart], x: alt.X) -> alt.LayerChart:
    """Put layers into rows with names, below the headings of their facets."""
    rows, headings = _rows(chart)
    above = _of(headings).mark_text(align="left", fontWeight="bold", limit=alt.ExprRef("width"))
    layers = [*layers, *[above.encode(x=alt.value(0), text="text:N")] * bool(headings)]
    names = [row[DIGITS:].split("\n") for row in rows.values()]
    name = f"split(slice(datum.label, {DIGITS}), '\\n')"
    axis = alt.Axis(
        labelExpr=name,
        labelLimit=0,
        labelLineHeight=LINE,
        # centre the lines on the row; by default the first is at the row, the others below
        labelOffset=alt.ExprRef(f"{-LINE / 2} * (length({name}) - 1)"),
        minExtent=LETTER * max((len(line) for lines in names for line in lines), default=0) + 8,
        ticks=False,
        domain=False,
    )
    y = alt.Y("row:N", sort="ascending", title=None, axis=axis)
    step = max(BAR, LINE * max(map(len, names), default=1) + 6)
    height = step * max(len(rows) + len(headings), 2)
    return alt.layer(*layers).encode(x=x, y=y).properties(height=height)


def _rows(chart: Chart) -> tuple[dict[tuple[str, str], str], list[Row]]:
    """Return the row of each (facet, series), and the rows of headings.

    Rows begin with a number, by which they are ordered, so that hidden ones take no room.
    """
    rows, headings = dict[tuple[str, str], str](), list[Row]()
    for facet, names in chart.facets.items():
        if facet:
            row = f"{len(rows) + len(headings):0{DIGITS}}"
            headings.append({"s": "", "row": row, "text": facet})
        for name in names:
            lines = fill(name, NAME_LETTERS, max_lines=NAME_LINES, placeholder=" …")
            rows[facet, name] = f"{len(rows) + len(headings):0{DIGITS}}{lines}"
    return rows, headings


def _bars(chart: Chart, _: dict[str, str]) -> alt.LayerChart:
    """Draw a bar per row with its value and interval, ticks of guides, and crosses of failures.

    The longest bar or tick of a facet is as long as the plot; values are a column at its right.
    """
    rows, _headings = _rows(chart)
    guides = [p for guide in chart.guides for p in guide.points if (p.facet, p.series) in rows]
    largest = dict.fromkeys(chart.facets, 0.0)
    for p in (*chart.points, *guides):
        largest[p.facet] = max(largest[p.facet], p.high or p.y)

    def place(p: Point) -> Row:
        unit = largest[p.facet] or 1.0
        ends = {name: y and y / unit for name, y in (("at", p.y), ("lo", p.low), ("hi", p.high))}
        return _row(chart, p) | ends | {"row": rows[p.facet, p.series]}

    bars = _of(map(place, chart.points))
    bounds = bars.transform_filter("isValid(datum.lo)").encode(x=alt.X("lo:Q"), x2=alt.X2("hi:Q"))
    layers = [
        bars.mark_bar(height=BAR * 0.55, color=PALETTE[0]).encode(tooltip=TIP),
        bars.mark_text(align="right").encode(x=alt.value("width"), text="value:N"),
        bounds.mark_rule(strokeWidth=1.5),
    ]
    if chart.failures:
        failed = [_failure(m, m.words) | {"row": rows[m.facet, m.series]} for m in chart.failures]
        crosses = _of(failed).encode(x=alt.value(8), tooltip=TIP)
        layers += [
            crosses.mark_point(shape=CROSS, size=50, strokeWidth=2, opacity=1, color=PALETTE[1]),
            crosses.mark_text(align="left", dx=8).encode(text="word:N"),
        ]
    if guides:
        marks = _of(place(p) for p in guides).encode(tooltip=TIP)
        layers.append(marks.mark_tick(thickness=2.5, height=BAR * 0.9, color=GREY))
    longest = max((len(format_cell(p.y, chart.y.kind)) for p in chart.points), default=0)
    room = {"expr": f"width - {LETTER * longest + 18}"}
    scale = alt.Scale(domain=[0, 1], range=[0, room])
    return _in_rows(chart, layers, alt.X("at:Q", axis=None, scale=scale))


def _cells(chart: Chart, _: dict[str, str]) -> alt.LayerChart:
    """Draw a cell per value with its text; a higher value is darker, also in a grey print."""
    rows, _headings = _rows(chart)
    xs = sorted({*_values(chart, "x"), *(m.x for m in chart.failures)})
    columns = {x: f"{i:0{DIGITS}}{_format_x(x, chart.x)}" for i, x in enumerate(xs)}

    def place(one: Point | Mark) -> Row:
        return {"row": rows[one.facet, one.series], "column": columns[one.x]}

    cells = _of(_row(chart, p) | place(p) for p in chart.points).encode(tooltip=TIP)
    failed = _of(_failure(m, "×") | place(m) for m in chart.failures).encode(tooltip=TIP)
    is_ratio = min(_values(chart, "y"), default=0) > 0
    shade = alt.Scale(type="log" if is_ratio else "linear", range=CELL_COLOURS, nice=False)
    edge: dict[str, Any] = {"stroke": GREY, "strokeWidth": 0.5}
    layers = [
        cells.mark_rect(**edge).encode(fill=alt.Fill("y:Q", scale=shade, legend=None)),
        cells.mark_text(color="#000000").encode(text="value:N"),
        failed.mark_rect(**edge, fill="transparent"),
        failed.mark_text().encode(text="word:N"),
    ]
    axis = alt.Axis(
        orient="top",
        labelAngle=0,
        title=chart.x.name,
        ticks=False,
        domain=False,
        labelExpr=f"slice(datum.label, {DIGITS})",
    )
    return _in_rows(chart, layers, alt.X("column:N", sort="ascending", axis=axis))
