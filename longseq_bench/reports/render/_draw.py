"""Charts drawn by Altair: the chart of a notebook, of an HTML page, and the picture of Markdown.

One drawing serves all of them, so that they show the same figures. Names of series are data in it,
never part of an expression. Formats import this module only to draw; the underscore keeps the
registry from importing it. Texts and axes have the colour of the text around them, so light, dark
and paper need no second drawing; a picture in a file is black on white (data/charts.yaml).
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from textwrap import fill, wrap
from typing import Any, get_args

import altair as alt
from altair.utils.schemapi import debug_mode

from longseq_bench.core.files import load_table
from longseq_bench.core.model import Status
from longseq_bench.reports.document import Chart, Mark, Point, format_cell

NAME_LETTERS, TITLE_LETTERS = 27, 95
"""Letters of a line of a row's name, and of a line of a title."""
TIP = [alt.Tooltip("w:N", title=" ")]

ChartRow = dict[str, Any]


def draw(chart: Chart, styles: dict[str, str] | None = None) -> alt.LayerChart:
    """Return a chart with its title, as wide as its container.

    styles: colours of its series, from `colours`; None: those of a chart alone.
    """
    styles = styles or colours(chart, {})
    points = [p for p in chart.points if p.series in styles and math.isfinite(p.x + p.y)]
    failures = dict.fromkeys(m for m in chart.failures if m.series in styles)
    shown = replace(chart, points=tuple(points), failures=tuple(failures))
    drawn = _bars(shown) if chart.shape == "bars" else _lines(shown, styles)
    title, text = wrap(chart.title, TITLE_LETTERS), chart.description
    config = load_table("charts.yaml")["config"]
    return drawn.properties(width="container", title=title, description=text, config=config)


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
    is_lines, names = chart.shape != "bars", chart.series
    if chart.failures and is_lines:
        yield "× at the top: a trial or search that failed; see Failures."
    for guide in chart.guides:
        words = ", ".join(dict.fromkeys((guide.name, guide.description)))
        yield f"{'Dashed grey' if is_lines else 'Grey tick'}: {words}."
    if is_lines and (more := len(names[len(PALETTE) : MAX_SERIES])):
        yield f"Pale grey: {more} further series."
    if more := len(names[MAX_SERIES:]):
        yield f"Not drawn, to keep the chart readable: {more} of {len(names)} series."


# ---- rows of data --------------------------------------------------------------------------------


def _of(rows: Iterable[ChartRow]) -> alt.Chart:
    return alt.Chart({"values": list(rows)})


def _row(chart: Chart, p: Point) -> ChartRow:
    """Return a point as a row of data, with its value as text and the words of its tooltip."""
    at = "" if chart.shape == "bars" else f"{chart.x.name} {format_cell(p.x, chart.x.kind)}"
    value = format_cell(p.y, chart.y.kind)
    words = ", ".join(filter(None, (at, f"{chart.y.name} {value}", p.words)))
    text = {"value": value, "w": f"{p.series}: {words}" if p.series else words}
    row = {"s": p.series, "row": fill(p.series, NAME_LETTERS)}
    return row | {"x": p.x, "y": p.y, "lo": p.low, "hi": p.high} | text


def _failure(m: Mark, other: str = "") -> ChartRow:
    """Return a failure as a row of data; `word` is its status (OOM, timeout), or the other word."""
    status = re.split(r"[ ,]", m.words, maxsplit=1)[0]
    word = status.replace("oom", "OOM") if status in get_args(Status) else other
    row = {"s": m.series, "row": fill(m.series, NAME_LETTERS)}
    return row | {"x": m.x, "word": word, "w": f"{m.series}: {m.words}"}


# ---- lines ---------------------------------------------------------------------------------------


def _lines(chart: Chart, styles: dict[str, str]) -> alt.LayerChart:
    """Draw lines with intervals, guides, and a cross at the top for each failed length.

    A click in the legend singles out a series.
    """
    # those in colour lie over the grey ones
    points = sorted(chart.points, key=lambda p: styles[p.series] != PALE)
    scale = alt.Scale(domain=list(styles), range=list(styles.values()))
    named = [name for name, colour in styles.items() if colour != PALE]
    columns = alt.ExprRef("clamp(floor(width / 270), 1, 3)")
    legend = alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=260, values=named)
    colour = alt.Color("s:N", scale=scale, legend=legend)
    picked = alt.selection_point(fields=["s"], bind="legend")
    opacity = alt.condition(picked, alt.value(1), alt.value(0.12))
    base = _of(_row(chart, p) for p in points).encode(color=colour, opacity=opacity)
    bounds = base.transform_filter("isValid(datum.lo)").encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi:Q"))
    layers = [
        base.mark_line(strokeWidth=1.8).encode(detail=alt.Detail("s:N")),
        base.mark_point(filled=True, size=46).encode(tooltip=TIP),
        bounds.mark_rule(strokeWidth=1.5),
    ]
    top = 0
    if chart.failures:
        # those of one length are one below the other
        failed = list(dict.fromkeys(m.series for m in chart.failures))
        places = [6 + 8 * (failed.index(m.series) % 8) for m in chart.failures]
        top = max(places)
        marks = [_failure(m) | {"top": at} for m, at in zip(chart.failures, places, strict=True)]
        crosses = _of(marks).encode(y=alt.Y("top:Q", scale=None), color=colour, tooltip=TIP)
        layers += [
            crosses.mark_point(shape=CROSS, size=50, strokeWidth=2, opacity=1),
            crosses.mark_text(align="left", dx=7, fontSize=9).encode(text="word:N"),
        ]
    for guide in chart.guides:
        line = [_row(chart, p) | {"s": guide.name} for p in guide.points]
        last = _of(line[-1:]).mark_text(align="right", dy=-7, color=GREY)
        dashed = _of(line).mark_line(strokeDash=[4, 4], color=GREY, strokeWidth=1.5)
        layers += [dashed, last.encode(text="s:N")]
    layers[0] = layers[0].add_params(picked)
    x, y = _channel(chart, "x", alt.Undefined), _channel(chart, "y", [HEIGHT, top])
    return alt.layer(*layers).encode(x=x, y=y).properties(height=HEIGHT)


def _channel(chart: Chart, name: str, ends: Any) -> Any:
    """Return the channel of "x" or "y", with its scale, ticks and labels.

    Of few lengths, ranks or shares each has a tick, also if it failed.
    """
    every = [*chart.points, *(p for guide in chart.guides for p in guide.points)]
    axis, values = getattr(chart, name), [getattr(p, name) for p in every]
    is_log, is_binary = axis.log and min(values, default=0) > 0, axis.kind in ("tokens", "bytes")
    exact = {*values, *(m.x for m in chart.failures)}
    ticks = sorted(exact) if name == "x" and len(exact) <= MAX_TICKS else alt.Undefined
    label = alt.Axis(
        title=axis.name,
        labelExpr=load_table("charts.yaml")["labels"].get(axis.kind, alt.Undefined),
        labelOverlap=True,
        values=ticks,
        # lines of x are as long as the range of y, so below crosses they would miss the axis
        grid=name == "y" or not chart.failures,
    )
    more: ChartRow = {"base": 2 if is_binary else 10} if is_log else {"zero": False}
    more |= {"type": "log" if is_log else "linear"}
    scale = alt.Scale(nice=False, padding=PADDING, range=ends, **more)
    return (alt.X if name == "x" else alt.Y)(f"{name}:Q", scale=scale, axis=label)


# ---- bars, whose series are rows with names ------------------------------------------------------


def _bars(chart: Chart) -> alt.LayerChart:
    """Draw a bar per row with its value and interval, ticks of guides, and crosses of failures.

    Values are a column at the right.
    """
    bars = _of(_row(chart, p) for p in chart.points)
    bounds = bars.transform_filter("isValid(datum.lo)").encode(x=alt.X("lo:Q"), x2=alt.X2("hi:Q"))
    crosses = _of(_failure(m, m.words) for m in chart.failures).encode(x=alt.value(8), tooltip=TIP)
    cross: dict[str, Any] = {"shape": CROSS, "size": 50, "strokeWidth": 2, "opacity": 1}
    guides = (p for guide in chart.guides for p in guide.points if p.series in chart.series)
    ticks = _of(_row(chart, p) for p in guides).encode(tooltip=TIP)
    layers = [
        bars.mark_bar(height=BAR * 0.55, color=PALETTE[0]).encode(tooltip=TIP),
        bars.mark_text(align="right").encode(x=alt.value("width"), text="value:N"),
        bounds.mark_rule(strokeWidth=1.5),
        crosses.mark_point(**cross, color=PALETTE[1]),
        crosses.mark_text(align="left", dx=8).encode(text="word:N"),
        ticks.mark_tick(thickness=2.5, height=BAR * 0.9, color=GREY),
    ]
    room = LETTER * max(len(format_cell(p.y, chart.y.kind)) for p in chart.points) + 18
    scale = alt.Scale(nice=False, range=[0, {"expr": f"width - {room}"}])
    names = [fill(name, NAME_LETTERS).split("\n") for name in chart.series]
    lines = "split(datum.label, '\\n')"
    axis = alt.Axis(
        labelExpr=lines,
        labelLimit=0,
        labelLineHeight=LINE,
        # centre the lines on the row; by default the first is at the row, the others below
        labelOffset=alt.ExprRef(f"{-LINE / 2} * (length({lines}) - 1)"),
        minExtent=LETTER * max(len(line) for name in names for line in name) + 8,
        ticks=False,
        domain=False,
    )
    domain = alt.Scale(domain=["\n".join(name) for name in names])
    y = alt.Y("row:N", scale=domain, title=None, axis=axis)
    height = max(BAR, LINE * max(map(len, names)) + 6) * max(len(names), 2)
    x = alt.X("y:Q", axis=None, scale=scale)
    return alt.layer(*layers).encode(x=x, y=y).properties(height=height)


# ---- the look: colours, labels and ticks of axes -------------------------------------------------

PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d", "#4d4d4d"]
"""Colours that colour-blind readers can distinguish (Okabe and Ito, 2008), on white and black."""
CROSS = "M-1,-1L1,1M1,-1L-1,1"
GREY, PALE = "#888888", "#bbbbbb"
"""Colours of guides, and of series that are context."""
WIDTH, HEIGHT, PADDING = 620, 320, 12
"""Size of a plot, and space between its edges and the values (px)."""
LETTER, LINE, BAR = 6, 13, 26
"""Width of a letter, height of a line and of a row of bars (px)."""
MAX_SERIES = 32
"""Drawn series, those without a colour in grey."""
MAX_TICKS = 9
"""Most lengths, ranks or densities of which each has a tick."""


def colours(chart: Chart, known: dict[str, str]) -> dict[str, str]:
    """Return the colour of each drawn series; only the best have one, the others are pale.

    known: colours in earlier charts of the same report, which series keep; new ones are added.
    Bars have names and one colour.
    """
    names = chart.series[:MAX_SERIES]
    if chart.shape == "bars":
        return dict.fromkeys(names, PALETTE[0])
    styles = dict.fromkeys(names, PALE)
    sign = 1 if chart.y.kind in ("seconds", "bytes", "error") else -1
    ends: dict[str, tuple[float, float]] = {}
    for p in chart.points:
        ends[p.series] = min((-p.x, sign * p.y), ends.get(p.series, (math.inf, math.inf)))
    # those that reach farthest, and of these the best; those that only failed come last
    best = sorted(names, key=lambda name: ends.get(name, (math.inf, math.inf)))[: len(PALETTE)]
    for name in sorted((n for n in names if n in best), key=lambda name: name not in known):
        free = [colour for colour in PALETTE if colour not in styles.values()]
        unused = [colour for colour in free if colour not in known.values()]
        styles[name] = known[name] if known.get(name) in free else [*unused, *free][0]
        known.setdefault(name, styles[name])
    return styles
