"""The look of all charts: colours, labels and ticks of axes, and Vega-Lite's configuration.

Texts and axes have the colour of the text around them, so light, dark and paper need no second
drawing; a picture in a file is black on white.
"""

import math
from typing import Any

from longseq_bench.reports.document import Chart, Kind

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

CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    "title": {"anchor": "start", "limit": 0, "color": "currentColor"},
    "view": {"stroke": None},
    "legend": {"labelColor": "currentColor", "labelFontSize": 12, "columnPadding": 18},
    "rule": {"color": "currentColor"},
    "text": {"color": "currentColor"},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500, "titlePadding": 8}
    | {f"{part}Color": "currentColor" for part in ("label", "title", "grid", "domain", "tick")}
    | {"labelOpacity": 0.75, "gridOpacity": 0.1, "domainOpacity": 0.35, "tickOpacity": 0.35},
}

_LABELS: dict[Kind, str] = {
    # steps of a linear axis are no powers of two: 16,000,000
    "tokens": "v === 0 || v % (v < 1048576 ? 1024 : 65536) ? format(v, ',') : "
    "v < 1048576 ? format(v / 1024, ',') + 'k' : format(v / 1048576, '.4~r') + 'M'",
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


def label_expression(kind: Kind) -> str:
    """Return the expression of the labels of an axis."""
    words = _LABELS.get(kind, "format(v, '.3~r')")
    return words.replace("v ", "datum.value ").replace("(v,", "(datum.value,")


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
