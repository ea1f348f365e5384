"""Bars and heat maps: charts whose series are rows with names, in facets one below the other."""

import math
from textwrap import wrap
from typing import Any

import altair as alt

from longseq_bench.reports.document import Chart, Guide
from longseq_bench.reports.render._vega_parts import (
    CROSS,
    GREY,
    LETTER,
    LINE,
    PALETTE,
    TIP,
    Datasets,
    binary_ticks,
    failure_word,
    format_x,
    label_expression,
    named_data,
    pixel,
    point_row,
)

BAR = 26
"""Height of a row (px)."""
NAME_LETTERS, HEADING_LETTERS, MAX_LINES = 27, 54, 6
"""Letters of a line of a row's name and of a facet's heading, and maximum lines of a name."""
DIGITS = 5
"""Length of the number before a name of a row or column, by which they are ordered."""

Layers = list[alt.Chart]


class _Rows(dict[tuple[str, str], str]):
    """Id of the row of each (facet, series), and the rows of headings.

    Ids begin with a number, in which they sort, so that rows of hidden series take no room.
    """

    def __init__(self, chart: Chart) -> None:
        super().__init__()
        self.count = 0
        self.headings: list[dict[str, Any]] = []
        lines = [1]
        for facet, names in chart.facets.items():
            if facet:
                text = wrap(facet, HEADING_LETTERS)
                self.headings.append({"s": "", "row": self.next_id(), "text": text})
                lines.append(len(text))
            for name in names:
                wrapped = _wrap_name(name)
                self[facet, name] = self.next_id() + "\n".join(wrapped)
                lines.append(len(wrapped))
        self.step = max(BAR, LINE * max(lines) + 6)
        letters = [len(line) for name in self.values() for line in name[DIGITS:].split("\n")]
        self.extent = LETTER * max(letters, default=0) + 8

    def next_id(self) -> str:
        """Add a row and return its id, without a name."""
        self.count += 1
        return f"{self.count:0{DIGITS}}"

    @property
    def height(self) -> int:
        """Height of all rows (px)."""
        return self.step * max(self.count, 2)

    @property
    def channel(self) -> alt.Y:
        """The channel of the rows, with their names."""
        words = f"split(slice(datum.label, {DIGITS}), '\\n')"
        middle = {
            # centre the lines on the row; by default the first is at the row, the others below
            "condition": [
                {"test": f"length({words}) === {n}", "value": -LINE * (n - 1) / 2}
                for n in range(2, MAX_LINES + 1)
            ],
            "value": 0,
        }
        axis = alt.Axis(
            labelLimit=2 * self.extent, labelExpr=words, labelLineHeight=LINE, labelOffset=middle,
            minExtent=self.extent, ticks=False, domain=False,
        )  # fmt: skip
        return alt.Y("row:N", sort="ascending", title=None, axis=axis)

    def draw_headings(self, datasets: Datasets) -> Layers:
        """Write the headings of facets at the left of their rows."""
        if not self.headings:
            return []
        base = named_data(self.headings, datasets)
        texts = base.encode(x=pixel(-self.extent), y=self.channel, text=alt.Text("text:N"))
        return [texts.mark_text(align="left", fontWeight="bold", lineHeight=LINE)]


def _wrap_name(name: str) -> list[str]:
    """Return the lines of a name of a row; very long ones are cut in the middle."""
    lines = wrap(name, NAME_LETTERS) or [""]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES // 2], "…", *lines[1 - MAX_LINES // 2 :]]
    return lines


def draw_bars(chart: Chart, datasets: Datasets) -> tuple[Layers, int]:
    """Draw a bar per row with its value and interval, ticks of guides, and crosses of failures.

    Bars of several facets are as long as their share of the largest value of the facet.
    """
    ids, largest = _Rows(chart), _find_largest(chart)
    units = largest if len(largest) > 1 else dict.fromkeys(largest, 1.0)
    ticks = {(p.facet, p.series): p.y for guide in chart.guides for p in guide.points}
    bars = []
    for p in chart.points:
        end, tick = max(p.y, p.high or p.y), ticks.get((p.facet, p.series), 0.0)
        named = {"at": p.y, "lo": p.low, "hi": p.high, "end": end}
        scaled = {n: None if v is None else v / units[p.facet] for n, v in named.items()}
        gap = max(tick - end, 0.0) / largest[p.facet]
        bars.append(point_row(chart, p) | scaled | {"row": ids[p.facet, p.series], "gap": gap})
    room = (LETTER + 1) * max((len(row["value"]) for row in bars), default=0) + 12
    # a value without room between its bar and its tick is behind the tick
    gap_px = f"datum.gap * (width - {room})"
    behind = alt.ExprRef(expr=f"5 + ({gap_px} < {room} ? {gap_px} : 0)")
    ends: list[Any] = [0, {"expr": f"width - {room}"}]  # the text of the longest bar is in the plot
    label = alt.Axis(
        labelExpr=label_expression(chart.y.kind, log=False), title=chart.y.name,
        labelOverlap="greedy", labelSeparation=LETTER,
    )  # fmt: skip
    single = len(units) == 1
    if single and chart.y.kind == "bytes":
        label.values = binary_ticks(0, max(largest.values()))
    scale = alt.Scale(zero=True, nice=single, range=ends)
    x, y = alt.X("at:Q", axis=label if single else None, scale=scale), ids.channel
    base = named_data(bars, datasets).encode(y=y)
    layers = [
        base.mark_bar(height=BAR * 0.55, color=PALETTE[0]).encode(x=x, tooltip=TIP),
        base.mark_text(align="left", dx=behind).encode(x=alt.X("end:Q"), text=alt.Text("value:N")),
    ]
    if any(row["lo"] is not None for row in bars):
        bounded = base.transform_filter("isValid(datum.lo)").mark_rule(strokeWidth=1.5)
        layers.append(bounded.encode(x=alt.X("lo:Q"), x2=alt.X2("hi:Q")))
    layers += _draw_failed_bars(chart, datasets, ids)
    for guide in chart.guides:
        layers += _draw_guide(guide, chart, datasets, ids, units)
    return [*layers, *ids.draw_headings(datasets)], ids.height


def _find_largest(chart: Chart) -> dict[str, float]:
    """Return the value of the longest bar or tick of each facet."""
    every = [*chart.points, *(p for guide in chart.guides for p in guide.points)]
    return {
        facet: max((p.high or p.y for p in every if p.facet == facet), default=0) or 1.0
        for facet in chart.facets
    }


def _draw_failed_bars(chart: Chart, datasets: Datasets, ids: _Rows) -> Layers:
    """Draw a cross and its words in the row of each failure."""
    rows = [
        {"s": m.series, "row": ids[m.facet, m.series], "w": f"{m.series}: {m.words}",
         "word": failure_word(m) or m.words}
        for m in chart.failures
    ]  # fmt: skip
    if not rows:
        return []
    base = named_data(rows, datasets).encode(x=pixel(8), y=ids.channel, tooltip=TIP)
    crosses = base.mark_point(shape=CROSS, size=50, strokeWidth=2, opacity=1, color=PALETTE[1])
    return [crosses, base.mark_text(align="left", dx=8).encode(text=alt.Text("word:N"))]


def _draw_guide(
    guide: Guide, chart: Chart, datasets: Datasets, ids: _Rows, units: dict[str, float]
) -> Layers:
    """Draw a tick per bar, or a line across all bars for a point without a series; and its name."""
    rows = [
        point_row(chart, p)
        | {"row": ids.get((p.facet, p.series)), "at": p.y / units.get(p.facet, 1.0)}
        for p in guide.points
        if not p.series or (p.facet, p.series) in ids
    ]
    base = named_data(rows, datasets).encode(x=alt.X("at:Q"), tooltip=TIP)
    style: dict[str, Any] = {"thickness": 2.5, "height": BAR * 0.9, "color": GREY}
    ticks = base.transform_filter("isValid(datum.row)").encode(y=ids.channel)
    lines = base.transform_filter("!isValid(datum.row)")
    legend = named_data([{"row": ids.next_id(), "name": guide.name}], datasets)
    legend = legend.encode(x=pixel(4), y=ids.channel)
    layers = [
        ticks.mark_tick(**style),
        legend.mark_tick(**style),
        legend.mark_text(align="left", dx=8).encode(text=alt.Text("name:N")),
    ]
    if any(not p.series for p in guide.points):
        layers.append(lines.mark_rule(color=GREY, strokeWidth=1.5))
    return layers


def draw_heat(chart: Chart, datasets: Datasets) -> tuple[Layers, int]:
    """Draw a cell per value with its text; a higher value is darker, also in a grey print."""
    ids, known = _Rows(chart), [p.y for p in chart.points]
    xs = sorted({*(p.x for p in chart.points), *(m.x for m in chart.failures)})
    columns = {x: f"{i:0{DIGITS}}{format_x(x, chart.x.kind)}" for i, x in enumerate(xs)}
    cells = [
        point_row(chart, p)
        | {"row": ids[p.facet, p.series], "column": columns[p.x]}
        | {"fill": _shade(_place(p.y, min(known), max(known)))}
        for p in chart.points
    ]
    failures = [
        {"s": m.series, "row": ids[m.facet, m.series], "column": columns[m.x],
         "value": failure_word(m) or "×", "w": f"{m.series}: {m.words}"}
        for m in chart.failures
    ]  # fmt: skip
    axis = alt.Axis(
        orient="top", labelAngle=0, title=chart.x.name, ticks=False, domain=False,
        labelExpr=f"slice(datum.label, {DIGITS})",
    )  # fmt: skip
    place: dict[str, Any] = {"x": alt.X("column:N", sort="ascending", axis=axis), "y": ids.channel}
    base, failed = (named_data(r, datasets).encode(**place, tooltip=TIP) for r in (cells, failures))
    edge: dict[str, Any] = {"stroke": GREY, "strokeWidth": 0.5}
    layers = [
        base.mark_rect(**edge).encode(fill=alt.Fill("fill:N", scale=None)),
        base.mark_text(fontSize=11, color="#000000").encode(text=alt.Text("value:N")),
        failed.mark_rect(**edge, fill="transparent"),
        failed.mark_text(fontSize=11).encode(text=alt.Text("value:N")),
    ]
    return [*layers, *ids.draw_headings(datasets)], ids.height


def _place(value: float, low: float, high: float) -> float:
    """Return the place of a value between two others, 0 to 1; of ratios if all are above 0."""
    if low > 0:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low) if high > low else 0.0


def _shade(share: float) -> str:
    """Return a shade of blue, from pale (0) to strong (1); black text is readable on all."""
    ends = zip((0xEE, 0xF5, 0xFC), (0x50, 0x96, 0xD2), strict=True)
    return "#" + "".join(f"{round(pale + share * (strong - pale)):02x}" for pale, strong in ends)
