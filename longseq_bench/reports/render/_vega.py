"""Charts as Vega-Lite; vl-convert makes SVG of them without a browser.

One description makes both the picture of a Markdown report and the chart of an HTML page, so that
both show the same figures. Names of series are data in it, never part of an expression.
Formats import this module only to draw; the underscore keeps the registry from importing it.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from textwrap import wrap
from typing import Any, get_args

from longseq_bench.core.model import Status
from longseq_bench.reports.document import Chart, Kind, Mark, Point, format_cell
from longseq_bench.reports.render import _vega_lite as alt

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d", "#4d4d4d",
)  # fmt: skip
"""Colours that colour-blind readers can distinguish (Okabe and Ito, 2008), on white and black."""
SHAPES = ("circle", "square", "triangle-up", "diamond")
"""Shapes of points, in turn, so that a grey print distinguishes the series as well."""
CROSS = "M-1,-1L1,1M1,-1L-1,1"
MAX_COLOURS, MAX_SERIES, MAX_POINTS = len(PALETTE), 32, 2000
"""Series in colour, drawn series (those without a colour are grey), and drawn points."""
WIDTH, HEIGHT, BAR, PADDING = 620, 320, 26, 12
LETTER, LINE, MAX_LINES = 6, 13, 6
"""For the names of bars: width of a letter (px), height of a line (px), maximum number of lines."""
TITLE_LETTERS = 95
"""Letters of a line of a picture's title."""
MAX_TICKS = 9
"""Maximum number of lengths or ranks for which each gets its own tick."""

_LABELS: dict[Kind, str] = {
    "tokens": "v >= 1048576 ? format(v / 1048576, '.3~r') + 'M' : "
    "v >= 1024 ? format(v / 1024, '.3~r') + 'k' : format(v, '.3~r')",
    "bytes": "v >= 1073741824 ? format(v / 1073741824, '.3~r') + ' GiB' : "
    "v >= 1048576 ? format(v / 1048576, '.3~r') + ' MiB' : "
    "v >= 1024 ? format(v / 1024, '.3~r') + ' KiB' : format(v, '.3~r') + ' B'",
    "seconds": "format(v, '.3~s') + 's'",
    "flop_rate": "format(v, '.3~s') + 'FLOP/s'",
    "share": "format(v, '.3~%')",
    "ratio": "format(v, '.3~r') + '×'",
    "count": "format(v, '.3~s')",
}


TIP, GREY, PALE = [alt.Tooltip("w:N", title=" ")], "#888888", "#bbbbbb"
LOW_IS_GOOD: frozenset[Kind] = frozenset({"seconds", "bytes", "error"})
"""Kinds of values of which the lowest are the best; of others, the highest."""
Datasets = dict[str, list[dict[str, Any]]]
"""Rows of a chart, by the names that its layers use."""
MIN_MAGNITUDE = 1e-250
"""Smallest absolute value that a scale can hold, except 0; its inverse is the largest."""


def svg(chart: Chart) -> str:
    """Draw a chart with its legend, on white, with its description for screen readers."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(spec(chart, page=False)))


def spec(chart: Chart, page: bool) -> dict[str, Any]:
    """Return a chart as Vega-Lite.

    page: for an HTML page: as wide as its container, without title and legend, which the page
    writes itself. Its parameter `hidden` lists the series that are not shown.
    """
    chart, datasets = _clean(chart), Datasets()
    height = HEIGHT
    if chart.shape == "bars":
        room = 260 if page else 420
        layers = _bars(chart, datasets, room)
        height = max(BAR, LINE * _count_lines(chart, room) + 6) * max(len(_shown(chart)), 2)
    else:
        layers = _plot(chart, datasets, page)
    layers = [layer.transform_filter("indexof(hidden, datum.s) < 0") for layer in layers]
    if page and chart.shape != "bars":
        wheel = "wheel![event.ctrlKey || event.metaKey]"
        zoom = alt.selection_interval(name="zoom", bind="scales", zoom=wheel)
        layers[0] = layers[0].add_params(zoom)
    guides = [] if chart.shape == "bars" else _guides(chart, datasets)
    whole = alt.layer(*layers, *guides).add_params(alt.param(name="hidden", value=[]))
    whole = whole.properties(
        height=height, width="container" if page else WIDTH, description=chart.description
    )
    if page and chart.shape == "bars":
        # a value at the end of the longest bar is wider than the plot
        longest = max((len(format_cell(p.y, chart.y.kind)) for p in chart.points), default=0)
        whole = whole.properties(
            padding={"left": 5, "top": 5, "bottom": 5, "right": 5 + (LETTER + 1) * longest}
        )
    if not page:
        title = wrap(chart.title, TITLE_LETTERS)
        whole = whole.properties(title=title, background="white", padding=8)
    whole = whole.configure_title(anchor="start", limit=0)
    # a test checks it against the schema; a check here would double the time of many charts
    return {**whole.to_dict(), "datasets": datasets}


def colours(chart: Chart) -> dict[str, str]:
    """Return the colour of each series in the chart.

    At most MAX_COLOURS series have one; the others are grey context. Lines in colour are those that
    reach farthest, and among these the best. All bars have one colour, because names label them.
    """
    if chart.shape == "bars":
        return dict.fromkeys(_shown(chart), PALETTE[0])
    best = _best(chart)
    coloured = [name for name in _shown(chart) if name in best]
    return dict.fromkeys(_shown(chart), PALE) | dict(zip(coloured, PALETTE, strict=False))


def _best(chart: Chart) -> frozenset[str]:
    """Return the series that are drawn in colour."""
    sign = 1 if chart.y.kind in LOW_IS_GOOD else -1
    ends: dict[str, tuple[float, float]] = {}
    for point in chart.points:
        end = -point.x, sign * point.y
        ends[point.series] = min(end, ends.get(point.series, end))
    # series that only failed come last
    order = sorted(_shown(chart), key=lambda name: ends.get(name, (math.inf, math.inf)))
    return frozenset(order[:MAX_COLOURS])


def axes(chart: Chart) -> dict[str, dict[str, dict[str, Any]]]:
    """Return scale and labels, "linear" and "log", of the axes ("x", "y") that allow both."""
    chart = _clean(chart)
    ends = {"x": [p.x for p in chart.points], "y": [p.y for p in chart.points]}
    ends["y"] += [p.low for p in chart.points if p.low is not None]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, values in ends.items():
        if chart.shape != "bars" and values and min(values) > 0:
            for scale in ("linear", "log"):
                axis = replace(getattr(chart, name), log=scale == "log")
                channel = _axis(name, replace(chart, **{name: axis})).to_dict()
                parts = {part: channel[part] for part in ("scale", "axis")}
                found.setdefault(name, {})[scale] = parts
    return found


def count_left_out(chart: Chart) -> int:
    """Return the number of series above MAX_SERIES, which are not drawn."""
    return len(chart.series) - len(_shown(chart))


def notes(chart: Chart) -> Iterator[str]:
    """Yield sentences on the marks of a chart, and on series and points that it leaves out."""
    if chart.failures and chart.shape == "bars":
        yield "× at the left: failed; see Failures."
    elif chart.failures:
        meaning = "a length that failed" if chart.x.kind == "tokens" else "no length passed"
        yield f"× at the top: {meaning}; see Failures."
    if chart.guides:
        sign = "Grey tick" if chart.shape == "bars" else "Dashed grey"
        yield f"{sign}: {'; '.join(dict.fromkeys(guide.description for guide in chart.guides))}."
    if chart.shape != "bars" and len(_shown(chart)) > MAX_COLOURS:
        yield f"Pale grey: {len(_shown(chart)) - MAX_COLOURS} further series."
    if more := count_left_out(chart):
        yield f"Not drawn, to keep the chart readable: {more} of {len(chart.series)} series."
    if len(chart.points) > MAX_POINTS:
        yield f"Only the first {MAX_POINTS:,} of {len(chart.points):,} points are drawn."


def _shown(chart: Chart) -> list[str]:
    return chart.series[:MAX_SERIES]


def _plot(chart: Chart, datasets: Datasets, page: bool) -> list[alt.Chart]:
    """Draw lines or dots with intervals, and a cross at the top for each failed length.

    Grey series lie below those in colour. A page names the series itself.
    """
    x, y = _axis("x", chart), _axis("y", chart)
    colour, shape = _scales(chart)
    base = _chart(_rows(chart), datasets).encode(x=x, color=colour)
    dots = base.mark_point(filled=True, size=46, opacity=1).encode(y=y, shape=shape, tooltip=TIP)
    bounds = base.mark_rule(strokeWidth=1.5, opacity=0.7).encode(y=alt.Y("lo:Q"), y2="hi:Q")
    layers = [dots, bounds.transform_filter("isValid(datum.lo)")]
    if chart.shape == "lines":
        layers.insert(0, base.mark_line(strokeWidth=1.8).encode(y=y, detail="s:N"))
    if not page:
        layers.append(_end_labels(chart, datasets, colour))
    # without `sort` Vega-Lite writes the names into an expression
    offset = alt.YOffset("row:Q", scale=None, sort="ascending")
    crosses = _crosses(chart, datasets, x=x, y=alt.value(0), yOffset=offset, color=colour)
    return [*layers, *crosses]


def _end_labels(chart: Chart, datasets: Datasets, colour: Any) -> alt.Chart:
    """Write the name of each series in colour at its last point.

    Names at nearly equal heights are moved apart, so that all of them can be read.
    """
    ends: dict[str, Point] = {}
    for point in chart.points:
        if point.series not in ends or point.x >= ends[point.series].x:
            ends[point.series] = point
    grey = {name for name, shade in colours(chart).items() if shade == PALE}
    last = [point for name, point in ends.items() if name not in grey]
    heights = _separate([_height(chart, point.y) for point in last])
    rows = [
        {"s": p.series, "x": p.x, "at": height} for p, height in zip(last, heights, strict=True)
    ]
    base = _chart(rows, datasets).encode(
        x="x:Q", y=alt.value(0), yOffset=alt.YOffset("at:Q", scale=None, sort="ascending")
    )
    names: alt.Chart = base.mark_text(align="left", dx=8).encode(text="s:N", color=colour)
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
    if order and (over := placed[order[-1]] - HEIGHT) > 0:  # the last ones are below the plot
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
        words.setdefault((m.x, rows[m.series]), {})[_word(m)] = m.series
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
    base = _chart(marks, datasets).encode(**encoding, tooltip=TIP)
    crosses = base.mark_point(shape=CROSS, size=50, strokeWidth=2, opacity=1)
    return [crosses, base.mark_text(align="left", dx=7, fontSize=9).encode(text="word:N")]


def _word(mark: Mark) -> str:
    """Return the status that begins the words of a failure: OOM, timeout; "" for other words."""
    word = re.split(r"[ ,]", mark.words, maxsplit=1)[0]
    return {"oom": "OOM"}.get(word, word if word in get_args(Status) else "")


def _cross_rows(chart: Chart) -> dict[str, int]:
    """Return the distance of each series' crosses from the top (px)."""
    shown, failed = set(_shown(chart)), dict.fromkeys(m.series for m in chart.failures)
    return {s: 6 + 8 * (i % 8) for i, s in enumerate(s for s in failed if s in shown)}


def _bars(chart: Chart, datasets: Datasets, room: int) -> list[alt.Chart]:
    """Draw a bar per series with its interval, a tick per guide, and a cross per failure.

    room: width for the names (px).
    """
    rows = _rows(chart)
    colour, _ = _scales(chart)
    y = alt.Y("s:N", sort=None, title=None, axis=_names(chart, room))
    label = alt.Axis(labelExpr=_label(chart.y.kind, log=False), title=chart.y.name)
    x = alt.X("y:Q", axis=label, scale=alt.Scale(zero=True))
    base = _chart(rows, datasets).encode(y=y)
    layers = [
        base.mark_bar(height=BAR * 0.55).encode(x=x, color=colour, tooltip=TIP),
        base.mark_text(align="left", dx=5).encode(x=x, text="value:N"),
    ]
    if any(row["lo"] is not None for row in rows):
        bounded = base.transform_filter("isValid(datum.lo)").mark_rule(strokeWidth=1.5)
        layers.append(bounded.encode(x=alt.X("lo:Q"), x2="hi:Q"))
    for guide in chart.guides:
        limits = [_row(chart, p) for p in guide.points if p.series in _shown(chart)]
        ticks = _chart(limits, datasets).encode(y=y, x=alt.X("y:Q", axis=label), tooltip=TIP)
        layers.append(ticks.mark_tick(thickness=2.5, height=BAR * 0.9, color=GREY))
    return [*layers, *_crosses(chart, datasets, x=alt.value(8), y=y, color=colour)]


def _names(chart: Chart, room: int) -> alt.Axis:
    """Return the names of bars; long names are wrapped, because cut names could look equal."""
    letters = room // LETTER
    if all(len(name) <= letters for name in _shown(chart)):
        return alt.Axis(labelLimit=room)
    pattern = _line_pattern(letters).replace("\\", "\\\\")
    cut = f"truncate(datum.label, {MAX_LINES * letters}, 'center')"
    wrapped = f"replace({cut}, regexp('{pattern}', 'gu'), '$1$2\\n')"
    words = f"split(trim({wrapped}), '\\n')"
    middle = {
        # centre the lines on the bar; by default the first line is at the bar, the others below
        "condition": [
            {"test": f"length({words}) === {n}", "value": -LINE * (n - 1) / 2}
            for n in range(2, _count_lines(chart, room) + 1)
        ],
        "value": 0,
    }
    return alt.Axis(
        labelLimit=2 * room, labelExpr=words, labelLineHeight=LINE, labelOffset=middle
    )  # fmt: skip


def _count_lines(chart: Chart, room: int) -> int:
    """Return the largest number of lines that a name of a bar takes."""
    letters = room // LETTER
    limit, half = MAX_LINES * letters, (MAX_LINES * letters - 1) // 2
    lines = 1
    for name in _shown(chart):
        cut = name if len(name) <= limit else f"{name[:half]}…{name[-half:]}"
        lines = max(lines, len(re.findall(_line_pattern(letters), cut)))
    return lines


def _line_pattern(letters: int) -> str:
    """Return a pattern for one line of a name; it breaks at spaces if words are short enough."""
    return rf"(.{{1,{letters}}})(?:\s+|$)|(.{{{letters}}})"


def _guides(chart: Chart, datasets: Datasets) -> list[alt.Chart]:
    """Draw guides as dashed lines with their names at the ends."""
    lines = []
    for guide in chart.guides:
        rows = [{"x": p.x, "y": p.y, "s": guide.name} for p in guide.points]
        base = _chart(rows, datasets).encode(x="x:Q", y="y:Q")
        lines.append(base.mark_line(strokeDash=[4, 4], color=GREY, strokeWidth=1.5))
        last = _chart(rows[-1:], datasets).encode(x="x:Q", y="y:Q", text="s:N")
        lines.append(last.mark_text(align="right", dy=-7, color=GREY))
    return lines


def _rows(chart: Chart) -> list[dict[str, Any]]:
    """Return a row per point; grey series first, so that those in colour are drawn over them."""
    styles = colours(chart)
    return [_row(chart, p) for p in sorted(chart.points, key=lambda p: styles[p.series] != PALE)]


def _row(chart: Chart, p: Point) -> dict[str, Any]:
    where = [] if chart.shape == "bars" else [f"{chart.x.name} {format_cell(p.x, chart.x.kind)}"]
    value = f"{chart.y.name} {format_cell(p.y, chart.y.kind)}"
    words = ", ".join([*where, value, *[p.words] * bool(p.words)])
    return {
        "s": p.series, "x": p.x, "y": p.y, "lo": p.low, "hi": p.high, "w": f"{p.series}: {words}",
        "value": format_cell(p.y, chart.y.kind),
    }  # fmt: skip


def _clean(chart: Chart) -> Chart:
    """Return the part of the chart that is drawn.

    Control characters are replaced: the renderer would end the process on them. Values that are
    not finite, too large or too small for a scale are left out.
    """
    shown = set(_shown(chart))

    def words(text: str) -> str:
        return "".join(c if c.isprintable() else " " for c in text)

    def drawable(value: float) -> bool:
        return value == 0 or MIN_MAGNITUDE < abs(value) < 1 / MIN_MAGNITUDE

    def point(p: Point) -> Point:
        low, high = (
            float(end) if end is not None and drawable(end) else None for end in (p.low, p.high)
        )
        return Point(words(p.series), float(p.x), float(p.y), low, high, words(p.words))

    points = [p for p in chart.points if p.series in shown and drawable(p.x) and drawable(p.y)]
    return replace(
        chart,
        title=words(chart.title),
        description=words(chart.description),
        points=tuple(map(point, points[:MAX_POINTS])),
        failures=tuple(
            Mark(words(m.series), float(m.x), words(m.words))
            for m in chart.failures
            if drawable(m.x)
        ),
        guides=tuple(
            replace(
                guide,
                name=words(guide.name),
                points=tuple(point(p) for p in guide.points if drawable(p.y)),
            )
            for guide in chart.guides
        ),
    )


def _chart(rows: list[dict[str, Any]], datasets: Datasets) -> alt.Chart:
    """Return a chart with its rows in `datasets`, which layers share."""
    name = f"rows {len(datasets)}"
    datasets[name] = rows
    return alt.Chart(alt.NamedData(name=name))


def _axis(name: str, chart: Chart) -> Any:
    """Return the channel of "x" or "y" with its scale and labels."""
    is_x = name == "x"
    axis, values = getattr(chart, name), [getattr(p, name) for p in chart.points]
    scale: dict[str, Any] = {"type": "linear", "zero": False, "nice": False, "padding": PADDING}
    if axis.log and values and min(values) > 0:
        scale |= {"type": "log", "base": 2 if axis.kind == "tokens" else 10}
        del scale["zero"]
    crosses = _cross_rows(chart)
    if crosses and not is_x:
        # below the crosses, because a cross on a point would seem to belong to that point
        scale["range"] = [HEIGHT, max(crosses.values())]
    words = _label(axis.kind, log=scale["type"] == "log")
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
    channel = alt.X if is_x else alt.Y
    return channel(f"{name}:Q", scale=alt.Scale(**scale), axis=label)


def _label(kind: Kind, log: bool) -> str:
    words = _LABELS.get(kind, "format(v, '.3~r')")
    if kind == "tokens" and not log:  # steps of a linear axis are not powers of two
        words = "format(v, ',')"
    return words.replace("v ", "datum.value ").replace("(v,", "(datum.value,")


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
