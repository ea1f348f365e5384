"""Parts that all charts share: colours, words, and the values that can be drawn."""

import math
import re
from dataclasses import replace
from typing import Any, get_args

import altair as alt

from longseq_bench.core.model import Status
from longseq_bench.reports.document import Chart, Kind, Mark, Point, format_cell

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d", "#4d4d4d",
)  # fmt: skip
"""Colours that colour-blind readers can distinguish (Okabe and Ito, 2008), on white and black."""
SHAPES = ("circle", "square", "triangle-up", "diamond")
"""Shapes of points, in turn, so that a grey print distinguishes the series as well."""
CROSS = "M-1,-1L1,1M1,-1L-1,1"
MAX_SERIES, MAX_POINTS = 32, 2000
"""Drawn series, those without a colour in grey, and drawn points, and failures."""
LETTER, LINE = 6, 13
"""Width of a letter and height of a line (px)."""

_LABELS: dict[Kind, str] = {
    "tokens": "v >= 1048576 ? format(v / 1048576, '.3~r') + 'M' : "
    "v >= 1024 ? format(v / 1024, '.3~r') + 'k' : format(v, '.3~r')",
    "bytes": "v >= 1073741824 ? format(v / 1073741824, '.3~r') + ' GiB' : "
    "v >= 1048576 ? format(v / 1048576, '.3~r') + ' MiB' : "
    "v >= 1024 ? format(v / 1024, '.3~r') + ' KiB' : format(v, '.3~r') + ' B'",
    "seconds": "format(v, '.3~s') + 's'",
    "flop_rate": "format(v, '.3~s') + 'FLOP/s'",
    "byte_rate": "format(v, '.3~s') + 'B/s'",
    "share": "format(v, '.3~%')",
    "ratio": "format(v, '.3~r') + '×'",
    "count": "format(v, '.3~s')",
    "error": "format(v, '.2~e')",
}
TIP, GREY, PALE = [alt.Tooltip("w:N", title=" ")], "#888888", "#bbbbbb"
MAX_DECADES, MAX_LOG_TICKS = 5, 16
"""Most decades with three ticks each, and most ticks, of a logarithmic axis."""
Datasets = dict[str, list[dict[str, Any]]]
"""Rows of a chart, by the names that its layers use."""
MIN_MAGNITUDE = 1e-250
"""Smallest absolute value that a scale can hold, except 0; its inverse is the largest."""


def colours(chart: Chart) -> dict[str, str]:
    """Return the colour of each series in the chart.

    The best series have one; the others are grey context. Names label all bars and rows of cells:
    bars have one colour, and cells that of their value.
    """
    if has_rows(chart):
        return dict.fromkeys(shown_series(chart), PALETTE[0] if chart.shape == "bars" else PALE)
    best = chart.find_best(shown_series(chart))
    coloured = [name for name in shown_series(chart) if name in best]
    return dict.fromkeys(shown_series(chart), PALE) | dict(zip(coloured, PALETTE, strict=False))


def has_rows(chart: Chart) -> bool:
    """Return True for bars and heat maps, whose series are rows with names."""
    return chart.shape in ("bars", "heat")


def shown_series(chart: Chart) -> list[str]:
    """Return the series that are drawn."""
    return chart.series[:MAX_SERIES]


def failure_word(mark: Mark) -> str:
    """Return the status that begins the words of a failure: OOM, timeout; "" for other words."""
    word = re.split(r"[ ,]", mark.words, maxsplit=1)[0]
    return {"oom": "OOM"}.get(word, word if word in get_args(Status) else "")


def point_row(chart: Chart, p: Point) -> dict[str, Any]:
    """Return a point as a row of data, with its value as text and the words of its tooltip."""
    at = f"{chart.x.name} {format_x(p.x, chart.x.kind)}"
    value = f"{chart.y.name} {format_cell(p.y, chart.y.kind)}"
    words = [*[at] * (chart.shape != "bars"), value, *[p.words] * bool(p.words)]
    return {
        "s": p.series, "x": p.x, "y": p.y, "lo": p.low, "hi": p.high,
        "w": ": ".join(filter(None, (p.series, ", ".join(words)))),
        "value": format_cell(p.y, chart.y.kind),
    }  # fmt: skip


def format_x(x: float, kind: Kind) -> str:
    """Format a value along x; shares have as many digits as they need."""
    return f"{x * 100:g} %" if kind == "share" else format_cell(x, kind)


def printable(text: str) -> str:
    """Return the text without control characters: the renderer would end the process on them."""
    return "".join(c if c.isprintable() else " " for c in text)


def is_drawable(value: float | None) -> bool:
    """Return True for a value that a scale can hold: finite, not too large or too small."""
    return value is not None and (value == 0 or MIN_MAGNITUDE < abs(value) < 1 / MIN_MAGNITUDE)


def clean(chart: Chart) -> Chart:
    """Return the part of the chart that is drawn, with printable words."""
    shown = set(shown_series(chart))

    def point(p: Point) -> Point:
        low, high = (
            float(end) if end is not None and is_drawable(end) else None for end in (p.low, p.high)
        )
        series, words, facet = map(printable, (p.series, p.words, p.facet))
        return Point(series, float(p.x), float(p.y), low, high, words, facet)

    def mark(m: Mark) -> Mark:
        series, words, facet = map(printable, (m.series, m.words, m.facet))
        return Mark(series, float(m.x), words, facet)

    points = [
        p for p in chart.points if p.series in shown and is_drawable(p.x) and is_drawable(p.y)
    ]
    failures = [m for m in chart.failures if m.series in shown and is_drawable(m.x)]
    guides = tuple(
        replace(
            guide,
            name=printable(guide.name),
            points=tuple(point(p) for p in guide.points if is_drawable(p.y)),
        )
        for guide in chart.guides
    )
    return replace(
        chart,
        description=printable(chart.description),
        points=tuple(map(point, points[:MAX_POINTS])),
        failures=tuple(dict.fromkeys(map(mark, failures)))[:MAX_POINTS],
        guides=guides,
    )


def named_data(rows: list[dict[str, Any]], datasets: Datasets) -> alt.Chart:
    """Return a chart with its rows in `datasets`: Altair would copy and check them at each step."""
    name = f"rows {len(datasets)}"
    datasets[name] = rows
    return alt.Chart(alt.NamedData(name=name))


def pixel(x: float) -> Any:
    """Return the channel of a place that is x pixels from the left of the plot."""
    return alt.XValue(x)  # type: ignore[no-untyped-call]


def binary_ticks(low: float, high: float) -> Any:
    """Return at most nine ticks that are multiples of a power of two: round KiB, MiB or GiB.

    Vega's own ticks would be round numbers of bytes, such as 381 MiB.
    """
    if not high > low:
        return alt.Undefined
    step = 2.0 ** math.ceil(math.log2((high - low) / 8))
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def decimal_ticks(low: float, high: float) -> Any:
    """Return ticks 1, 2, 5, 10, ... for a logarithmic axis; Vega would choose 4, 8, 30, 70."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= MAX_DECADES else (1,)
    ticks = [d * 10.0**power for power in range(first, last + 1) for d in digits]
    kept = [tick for tick in ticks if low <= tick <= high]
    return kept if 1 < len(kept) <= MAX_LOG_TICKS else alt.Undefined


def label_expression(kind: Kind, log: bool) -> str:
    """Return the expression of the labels of an axis."""
    words = _LABELS.get(kind, "format(v, '.3~r')")
    if kind == "tokens" and not log:  # steps of a linear axis are not powers of two
        words = "format(v, ',')"
    return words.replace("v ", "datum.value ").replace("(v,", "(datum.value,")
