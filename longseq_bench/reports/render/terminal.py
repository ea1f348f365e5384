"""A document on a terminal, as wide as that is: `longseq report --format terminal`.

Names and reasons are shown as they are: no markup of theirs, no escape sequence reaches a terminal.
Figures are never cut: where a table has no room, columns leave it, and it is said which.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from longseq_bench.cli.tables import NARROWEST_LABEL, Column, Fitted, one_line, plain, visible
from longseq_bench.reports.document import (
    COMPUTED,
    MISSING,
    Cell,
    Chart,
    Document,
    Guide,
    Mark,
    Point,
    Section,
    Spread,
    Table,
    format_cell,
)
from longseq_bench.reports.render.sparkline import Scale, Slots, bar, scale_of, slots_of

PROSE = 100
"""The longest line of a sentence: longer ones are hard to read."""
NARROWEST_WORDS = 12
LEAST_SLOTS, LONGEST_BAR = 8, 40
_Placed = TypeVar("_Placed", Point, Mark)
HINT = "a wider terminal or --format md has them"


def print_documents(documents: Iterable[Document], screen: Console) -> None:
    """Print whole reports on a console, one after the other, with two empty lines between."""
    for i, document in enumerate(documents):
        if i:
            screen.print("\n")
        print_document(document, screen)


def print_document(document: Document, screen: Console) -> None:
    """Print a whole report on a console, in its order."""
    _heading(document.title, "═", screen)
    for i, paragraph in enumerate(document.paragraphs):
        _apart(i, screen)
        _prose(paragraph, screen)
    for section in document.sections:
        screen.print()
        _print_section(section, screen)


def _print_section(section: Section, screen: Console) -> None:
    """A heading, and below it blocks with an empty line between."""
    _heading(section.title, "─", screen)
    blocks: list[Callable[[], None]] = [partial(_prose, p, screen) for p in section.paragraphs]
    if section.points:
        blocks.append(partial(_print_points, section.points, screen))
    blocks += [partial(print_chart, chart, screen) for chart in section.charts]
    blocks += [partial(_print_table, table, screen) for table in section.tables]
    if section.code:
        blocks.append(partial(_print_code, section.code, screen))
    for i, block in enumerate(blocks):
        _apart(i, screen)
        block()


def _apart(i: int, screen: Console) -> None:
    if i:
        screen.print()


def _print_points(points: Sequence[str], screen: Console) -> None:
    for point in points:
        _prose(point, screen, "• ")


def _print_code(lines: Sequence[str], screen: Console) -> None:
    for line in lines:
        # as it is, so that it can be copied: a terminal folds what is longer than itself
        screen.print(Text(visible(line.expandtabs())), soft_wrap=True)


def _heading(title: str, line: str, screen: Console) -> None:
    text = plain(title, "bold")
    screen.print(text)
    screen.print(Text(line * min(text.cell_len, screen.width), "dim"))


def _prose(sentence: str, screen: Console, mark: str = "", style: str = "") -> None:
    """A sentence in lines that are not too long, its mark hanging."""
    text = plain(sentence, style)
    width = max(1, min(PROSE, screen.width) - len(mark))
    for i, line in enumerate(text.wrap(screen, width, overflow="fold")):
        line.rstrip()
        screen.print(Text(mark if i == 0 else " " * len(mark)).append(line))


def _print_table(table: Table, screen: Console) -> None:
    if table.title:
        _prose(table.title, screen, style="bold")
    written = [
        [format_cell(cell, column.kind) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    order = _leaving(table)
    columns = [
        _column(i, column.name, column.kind == "text", order[i], [row[i] for row in written])
        for i, column in enumerate(table.columns)
    ][1:]
    rows = [{"label": row[0], "cells": row} for row in written]
    screen.print(Fitted(rows, columns, HINT, table.columns[0].name))


def _column(i: int, name: str, words: bool, leaves: int, cells: Sequence[str]) -> Column:
    """A column of a table; its heading takes as many lines as keep it as narrow as its cells."""
    name = one_line(name)
    width = max([*map(len, name.split()), *map(len, cells)], default=1)
    return Column(
        "\n".join(textwrap.wrap(name, width)),
        lambda row: plain(row["cells"][i]),
        leaves,
        wraps=NARROWEST_WORDS if words else 0,
        justify="left" if words else "right",
    )


def _leaving(table: Table) -> list[int]:
    """When each column leaves, 1 first: what is empty, what is the same in every row, then from the
    right, medians last."""

    def weight(i: int) -> tuple[int, int]:
        cells: list[Cell] = [row[i] for row in table.rows]
        if all(cell is None for cell in cells):
            return 0, -i
        if len(cells) > 1 and len(set(cells)) == 1:
            return 1, -i
        return 3 if any(isinstance(cell, Spread) for cell in cells) else 2, -i

    ordered = sorted(range(len(table.columns)), key=weight)
    return [ordered.index(i) + 1 for i in range(len(table.columns))]


def print_chart(chart: Chart, screen: Console, hint: str = HINT) -> None:
    """A chart in characters: a sparkline a series, or a bar each, with its figures in words.

    hint: where one finds what there was no room for.
    """
    _prose(chart.title, screen, style="bold")
    if chart.said:
        _prose(chart.said, screen, style="dim")
    if chart.series:
        (_print_bars if chart.shape == "bars" else _print_lines)(chart, screen, hint)


def _print_lines(chart: Chart, screen: Console, hint: str) -> None:
    scale = scale_of((p.y for p in chart.points), chart.y.log)
    places = [*(p.x for p in chart.points), *(m.x for m in chart.failures)]
    slots = slots_of(places, max(LEAST_SLOTS, (screen.width - 2 * NARROWEST_LABEL) // 2))
    points, marks = _by_series(chart.points), _by_series(chart.failures)
    rows = [_series(chart, name, points[name], marks[name], slots, scale) for name in chart.series]
    rows += [_guide(chart, guide) for guide in chart.guides]
    columns = [
        Column("", lambda row: str(row["line"]), justify="left"),
        Column(one_line(chart.y.name), lambda row: plain(row["said"]), 2, justify="left"),
    ]
    screen.print(Fitted(rows, [*columns, *_failed(chart)], hint))
    _prose(_legend(chart, slots, scale), screen, style="dim")


def _by_series(things: Iterable[_Placed]) -> Mapping[str, Sequence[_Placed]]:
    found: dict[str, list[_Placed]] = defaultdict(list)
    for thing in things:
        found[thing.series].append(thing)
    return found


def _series(
    chart: Chart, name: str, points: Sequence[Point], failures: Sequence[Mark],
    slots: Slots, scale: Scale | None,
) -> dict[str, Any]:  # fmt: skip
    line = slots.line([(p.x, p.y) for p in points], [m.x for m in failures], scale)
    at: dict[str, list[str]] = {}
    for mark in failures:
        at.setdefault(mark.words, []).append(format_cell(mark.x, chart.x.kind))
    failed = "; ".join(f"{words} at {', '.join(places)}" for words, places in at.items())
    return {"label": name, "line": line, "said": _ends(chart, points), "failed": failed}


def _guide(chart: Chart, guide: Guide) -> dict[str, Any]:
    said = _ends(chart, guide.points)
    label = f"{guide.name} (computed)" if guide.said == COMPUTED else guide.name
    return {"label": label, "line": "", "said": said, "failed": ""}


def _ends(chart: Chart, points: Iterable[Point]) -> str:
    """The values at the least and at the largest x."""
    ordered = sorted(points, key=lambda p: p.x)
    values = [format_cell(p.y, chart.y.kind) for p in ordered]
    if len(values) < 2:
        return values[0] if values else MISSING
    return f"{values[0]} → {values[-1]}"


def _failed(chart: Chart) -> list[Column]:
    """A column of where and how series failed, where any did."""
    words = Column("failed", lambda row: plain(row["failed"]), 1, NARROWEST_WORDS, "left")
    return [words] if chart.failures else []


def _legend(chart: Chart, slots: Slots, scale: Scale | None) -> str:
    """What the characters stand for."""
    first, last = (format_cell(x, chart.x.kind) for x in (slots.xs[0], slots.xs[-1]))
    words = [f"{chart.x.name} {first} to {last}" if first != last else f"{chart.x.name} {first}"]
    if slots.count < len(slots.xs):
        words.append("a character is the median of several")
    if scale and scale.high > scale.low:
        low, high = (format_cell(y, chart.y.kind) for y in (scale.low, scale.high))
        words.append(f"▁ {low}, █ {high}{', logarithmic' if scale.log else ''}")
    words += ["× failed"] if chart.failures else []
    return " · ".join(words)


def _print_bars(chart: Chart, screen: Console, hint: str) -> None:
    """Bars from 0, each with its figure; what it is set against in a column of its own."""
    rows = [_bar_row(chart, p) for p in chart.points]
    rows += [
        {"label": m.series, "y": None, "said": MISSING, "failed": m.words,
         "limits": _limits(chart, m.series)}
        for m in chart.failures
    ]  # fmt: skip
    figures = [Column(one_line(chart.y.name), lambda row: str(row["said"]))]
    limits = [
        Column(one_line(guide.name), lambda row, i=i: plain(row["limits"][i]), 1)  # type: ignore[misc]
        for i, guide in enumerate(chart.guides)
    ]
    taken = max(len(row["said"]) for row in rows) + 2 * NARROWEST_LABEL
    width = max(LEAST_SLOTS, min(LONGEST_BAR, screen.width - taken))
    largest = scale_of(p.y for p in chart.points)
    high = largest.high if largest else 0.0

    def drawn(row: dict[str, Any]) -> str:
        return bar(row["y"], high, width) if row["y"] is not None else ""

    bars = Column("", drawn, 2, justify="left")
    screen.print(Fitted(rows, [bars, *figures, *limits, *_failed(chart)], hint))


def _bar_row(chart: Chart, point: Point) -> dict[str, Any]:
    bounded = point.low is not None and point.high is not None
    cell = Spread(point.y, point.low or 0.0, point.high or 0.0) if bounded else point.y
    said = format_cell(cell, chart.y.kind)
    limits = _limits(chart, point.series)
    return {"label": point.series, "y": point.y, "said": said, "failed": "", "limits": limits}


def _limits(chart: Chart, series: str) -> list[str]:
    """What each guide gives for a bar."""
    found = [{p.series: p.y for p in guide.points}.get(series) for guide in chart.guides]
    return [format_cell(value, chart.y.kind) for value in found]
