"""Print documents in a terminal, as wide as it is: `longseq report --format terminal`.

Names and reasons are printed literally: markup and escape sequences in them have no effect.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from longseq_bench.analysis.grouping import group_by
from longseq_bench.core.plain_text import one_line, remove_control
from longseq_bench.reports.document import (
    COMPUTED,
    MISSING,
    Chart,
    Column,
    Document,
    KeyFigure,
    Mark,
    Point,
    Section,
    Spread,
    format_cell,
)
from longseq_bench.reports.render.sparkline import Scale, Slots, bar, scale_of, slots_of
from longseq_bench.reports.render.terminal_table import (
    MIN_LABEL,
    MIN_WORDS,
    Priority,
    TerminalColumn,
    TerminalTable,
)
from longseq_bench.reports.render.terminal_text import plain

MAX_LINE = 100
"""Maximum width of a sentence's lines (characters)."""
MIN_SLOTS, MAX_BAR = 8, 40
HINT = "a wider terminal or --format md has them"
STYLES = {
    "ok": "green", "faster": "green", "less": "green", "longer": "green", "mended": "green",
    "slower": "red", "more": "red", "shorter": "red", "broken": "red", "crashed": "red",
    "wrong": "red", "error": "red", "hang": "red", "missing": "red",
    "oom": "yellow", "out of memory": "yellow", "timeout": "yellow", "undecided": "yellow",
    "unstable": "yellow",
    "too noisy": "yellow", "note": "yellow", "unsupported": "dim",
}  # fmt: skip
"""Colours of statuses and verdicts, in any column but the first."""


def print_documents(documents: Iterable[Document], screen: Console) -> None:
    """Print reports one after the other, with two empty lines between."""
    for i, document in enumerate(documents):
        if i:
            screen.print("\n")
        print_document(document, screen)


def print_document(document: Document, screen: Console, hint: str = HINT) -> None:
    """Print a report; hint: where to find what a narrow terminal leaves out."""
    blocks = [_wrap(paragraph, screen) for paragraph in document.paragraphs]
    if document.figures:
        blocks.append([line for figure in document.figures for line in _figure(figure, screen)])
    parts = [_part(document.title, "═", blocks, screen)]
    parts += [_part(s.title, "─", _blocks(s, screen, hint), screen) for s in document.sections]
    for i, part in enumerate(filter(None, parts)):
        if i:
            screen.print()
        for line in part:
            # code is not wrapped, so that it can be copied; all else is as wide as the screen
            screen.print(line, soft_wrap=True)


Lines = list[Text | TerminalTable]
P = TypeVar("P", Point, Mark)


def _figure(figure: KeyFigure, screen: Console) -> Lines:
    words = f", {figure.words}" if figure.words else ""
    return _wrap(f"{figure.label}: {figure.value}{words}", screen, style="bold")


def _part(title: str, underline: str, blocks: Iterable[Lines], screen: Console) -> Lines:
    """Return a heading, and below it blocks with an empty line between."""
    lines: Lines = []
    for block in blocks:
        lines += [Text(), *block] if lines else block
    if not title:
        return lines
    heading = _wrap(title, screen, style="bold")
    width = max(line.cell_len for line in heading if isinstance(line, Text))
    return [*heading, Text(underline * width, "dim"), *lines]


def _blocks(section: Section, screen: Console, hint: str) -> Iterator[Lines]:
    yield from (_wrap(paragraph, screen) for paragraph in section.paragraphs)
    if section.points:
        yield [line for point in section.points for line in _wrap(point, screen, "• ")]
    yield from (_chart_lines(chart, screen, hint) for chart in section.charts)
    for table in section.tables:
        cells = zip(*table.rows, strict=True) if table.rows else [()] * len(table.columns)
        pairs = enumerate(zip(table.columns, cells, strict=True))
        columns = [_column(i, column, some) for i, (column, some) in pairs]
        title = _wrap(table.title, screen, style="bold") if table.title else []
        yield [*title, TerminalTable(columns, hint)]
    if section.code:
        yield [Text(remove_control(line.expandtabs())) for line in section.code]


def _wrap(sentence: str, screen: Console, mark: str = "", style: str = "") -> Lines:
    """Return a sentence in lines that are not too long; those after the mark are indented."""
    width = max(1, min(MAX_LINE, screen.width) - len(mark))
    lines: Lines = []
    for line in plain(sentence, style).wrap(screen, width, overflow="fold"):
        line.rstrip()
        lines.append(Text(" " * len(mark) if lines else mark).append(line))
    return lines


def _column(i: int, column: Column, cells: Sequence[object]) -> TerminalColumn:
    """Format a column; its heading is wrapped so that it is not wider than the cells."""
    words = column.kind == "text"
    texts = [plain(format_cell(cell, column.kind)) for cell in cells]  # type: ignore[arg-type]
    if i:
        for text in texts:
            text.stylize(STYLES.get(text.plain, ""))
    name = one_line(column.name)
    width = max(1, *map(len, name.split()), *(text.cell_len for text in texts))
    heading = "\n".join(textwrap.wrap(name, width))
    priority = _priority(i, column, cells)
    return TerminalColumn(heading, texts, words, priority, MIN_WORDS if i else MIN_LABEL)


def _priority(i: int, column: Column, cells: Sequence[object]) -> Priority:
    """Rank a column by its declared priority, else by content.

    Empty columns are left out first, then those with one value in all rows, then from the right;
    medians last.
    """
    if all(cell is None for cell in cells):
        return (-1, -i)
    if column.priority is not None:
        return (column.priority,)
    if len(cells) > 1 and len(set(cells)) == 1:
        return (-0.75, -i)
    return (-0.25 if any(isinstance(cell, Spread) for cell in cells) else -0.5, -i)


def _chart_lines(chart: Chart, screen: Console, hint: str) -> Lines:
    """Return a sparkline per series, or a bar each, with its figures."""
    lines = _wrap(chart.title, screen, style="bold")
    if chart.description:
        lines += _wrap(chart.description, screen, style="dim")
    if not chart.series:
        return lines
    if chart.shape in ("bars", "heat"):
        make = _bar_columns if chart.shape == "bars" else _heat_columns
        for facet in chart.facets:
            lines += _wrap(facet, screen, style="bold") if facet else []
            lines.append(TerminalTable(make(_only(chart, facet), screen), hint))
        return lines
    columns, legend = _sparklines(chart, screen)
    return [*lines, TerminalTable(columns, hint), *_wrap(legend, screen, style="dim")]


def _only(chart: Chart, facet: str) -> Chart:
    """Return the chart with one of its facets."""
    guides = [replace(guide, points=_of(guide.points, facet)) for guide in chart.guides]
    return replace(
        chart,
        points=_of(chart.points, facet),
        failures=_of(chart.failures, facet),
        guides=tuple(guide for guide in guides if guide.points),
    )


def _of(items: Iterable[P], facet: str) -> tuple[P, ...]:
    return tuple(item for item in items if item.facet == facet)


def _sparklines(chart: Chart, screen: Console) -> tuple[list[TerminalColumn], str]:
    """Return the columns of the best lines of a chart, and what their characters mean."""
    best = set(chart.find_best(chart.series))
    more = len(chart.series) - len(best)
    chart = replace(
        chart,
        points=tuple(p for p in chart.points if p.series in best),
        failures=tuple(m for m in chart.failures if m.series in best),
    )
    scale = scale_of((p.y for p in chart.points), chart.y.log)
    xs = [*(p.x for p in chart.points), *(m.x for m in chart.failures)]
    slots = slots_of(xs, max(MIN_SLOTS, (screen.width - 2 * MIN_LABEL) // 2))
    by_series = attrgetter("series")
    points, marks = group_by(chart.points, by_series), group_by(chart.failures, by_series)
    by_name = [(points.get(name, []), marks.get(name, [])) for name in chart.series]
    lines = [
        slots.line([(p.x, p.y) for p in passed], [m.x for m in failed], scale)
        for passed, failed in by_name
    ]
    guides = [
        f"{guide.name} (computed)" if guide.description == COMPUTED else guide.name
        for guide in chart.guides
    ]
    ends = [*(passed for passed, _ in by_name), *(guide.points for guide in chart.guides)]
    empty = [""] * len(guides)
    failures = [*(_failures(chart, failed) for _, failed in by_name), *empty]
    columns = [
        _column(0, Column("", priority=9), [*chart.series, *guides]),
        TerminalColumn("", [Text(line) for line in (*lines, *empty)], True, (4,), slots.count),
        _column(2, Column(chart.y.name, "count", 3), [_ends(chart, one) for one in ends]),
        *([_column(3, Column("failed", priority=2), failures)] if chart.failures else []),
    ]
    left_out = f" · not shown: {more} further series" if more else ""
    return columns, _legend(chart, slots, scale) + left_out


def _failures(chart: Chart, marks: Iterable[Mark]) -> str:
    by_words = group_by(marks, lambda mark: mark.words)
    return "; ".join(
        f"{words} at {', '.join(format_cell(mark.x, chart.x.kind) for mark in some)}"
        for words, some in by_words.items()
    )


def _ends(chart: Chart, points: Iterable[Point]) -> str:
    """Return the values at the smallest and at the largest x."""
    values = [format_cell(p.y, chart.y.kind) for p in sorted(points, key=lambda p: p.x)]
    if len(values) < 2:
        return values[0] if values else MISSING
    return f"{values[0]} → {values[-1]}"


def _legend(chart: Chart, slots: Slots, scale: Scale | None) -> str:
    first, last = (format_cell(x, chart.x.kind) for x in (slots.xs[0], slots.xs[-1]))
    words = [f"{chart.x.name} {first} to {last}" if first != last else f"{chart.x.name} {first}"]
    if slots.count < len(slots.xs):
        words.append("each character is a median of several values")
    if scale and scale.high > scale.low:
        low, high = (format_cell(y, chart.y.kind) for y in (scale.low, scale.high))
        words.append(f"▁ {low}, █ {high}{', logarithmic' if scale.log else ''}")
    words += ["× failed"] if chart.failures else []
    return " · ".join(words)


def _bar_columns(chart: Chart, screen: Console) -> list[TerminalColumn]:
    """Return bars from 0, each with its figure, and the guides in columns of their own."""
    y, failed_count = chart.y, len(chart.failures)
    names = [*(p.series for p in chart.points), *(m.series for m in chart.failures)]
    cells = [
        p.y if p.low is None or p.high is None else Spread(p.y, p.low, p.high) for p in chart.points
    ]
    figures = _column(2, Column(y.name, y.kind, 4), [*cells, *[None] * failed_count])
    width = max(MIN_SLOTS, min(MAX_BAR, screen.width - figures.width - 2 * MIN_LABEL))
    every = [*chart.points, *(p for guide in chart.guides for p in guide.points)]
    largest = max((p.y for p in every if math.isfinite(p.y)), default=0.0)
    bars = [*(Text(bar(p.y, largest, width)) for p in chart.points), *[Text()] * failed_count]
    guides = [(guide.name, {p.series: p.y for p in guide.points}) for guide in chart.guides]
    failed = [*[""] * len(chart.points), *(m.words for m in chart.failures)]
    return [
        _column(0, Column("", priority=9), names),
        TerminalColumn("", bars, True, (2,), MAX_BAR),
        figures,
        *(_column(3, Column(n, y.kind, 1), [at.get(name) for name in names]) for n, at in guides),
        *([_column(4, Column("failed", priority=1), failed)] if failed_count else []),
    ]


def _heat_columns(chart: Chart, _: Console) -> list[TerminalColumn]:
    """Return a column per x, with the value or the failure of each series."""
    cells: dict[tuple[str, float], str] = {
        (p.series, p.x): format_cell(p.y, chart.y.kind) for p in chart.points
    }
    cells |= {(m.series, m.x): m.words.partition(" ")[0] for m in chart.failures}
    columns = [_column(0, Column(chart.x.name, priority=9), chart.series)]
    for i, x in enumerate(sorted({x for _, x in cells}), 1):
        values = [cells.get((name, x)) for name in chart.series]
        columns.append(_column(i, Column(format_cell(x, chart.x.kind), "count"), values))
    return columns
