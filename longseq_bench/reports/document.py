"""The content of a report before any format: sections of sentences, tables and charts.

Values are raw and in SI units (s, B, FLOP, 1). The kind of a column decides how they are written,
so that every format prints the same figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from longseq_bench.analysis.row import ValueKind as ValueKind
from longseq_bench.core.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_tokens,
)

MISSING = "—"
MAX_FINDINGS, MAX_FIGURES, MAX_ANSWER_ROWS = 5, 5, 8
"""Limits of the findings of a section, and of the first screen: key figures, rows of its table."""
MAX_TABLES, MAX_CHARTS = 200, 12
"""Limits of the tables and charts of a section: records may name thousands of workloads."""


@dataclass(frozen=True)
class Spread:
    """A median and its interval, in one unit."""

    value: float
    low: float
    high: float

    @property
    def share(self) -> float:
        """The larger distance of a bound from the median, as a share of the median."""
        farther = max(self.high - self.value, self.value - self.low)
        return farther / self.value if self.value else 0.0


Cell = str | int | float | Spread | None


@dataclass(frozen=True)
class Column:
    """A heading, and the kind of quantity under it.

    priority: a narrow terminal leaves out the lowest priority first, equal ones together; None:
    before those with one, from the right.
    help: what the values are, if the heading does not say it.
    """

    name: str
    kind: ValueKind = "text"
    priority: int | None = None
    help: str = ""


@dataclass(frozen=True)
class Table:
    """A table; each row is as wide as the columns, and None is an unknown value."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


Shape = Literal["lines", "bars"]


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    log: logarithmic by default; the reader of a page may change it.
    """

    name: str
    kind: ValueKind
    log: bool = False


@dataclass(frozen=True)
class Point:
    """A measured value of a series, with its interval where it has one; words for a tooltip.

    Bars ignore x: each series is one bar.
    """

    series: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    words: str = ""


@dataclass(frozen=True)
class Mark:
    """A failure of a series at x, described in words."""

    series: str
    x: float
    words: str


@dataclass(frozen=True)
class Guide:
    """Reference values for the measured ones: a dashed line; in a bar chart a tick per bar.

    description: what the values are; most guides are computed.
    """

    name: str
    points: tuple[Point, ...]
    description: str = "computed, not measured"


@dataclass(frozen=True)
class Chart:
    """A chart of rows. `name` is short, for the name of its file; `title` has the workload.

    description: its content in words, for readers who can't see it.
    shape: each series is a line, or one bar.
    """

    name: str
    title: str
    description: str
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    failures: tuple[Mark, ...] = ()
    guides: tuple[Guide, ...] = ()
    shape: Shape = "lines"

    @property
    def series(self) -> list[str]:
        """All series, including those that only failed, in order of first appearance."""
        return list(
            dict.fromkeys([*(p.series for p in self.points), *(m.series for m in self.failures)])
        )


@dataclass(frozen=True)
class Section:
    """A heading, then paragraphs, points, charts, tables and literal lines, in this order.

    points: findings; at most MAX_FINDINGS.
    """

    title: str
    paragraphs: Sequence[str] = ()
    points: Sequence[str] = ()
    tables: Sequence[Table] = ()
    code: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    folded: bool = False
    """True if only its title is visible until a reader opens it."""
    technical: bool = False
    """True for environment, configs and commands, which a page groups at its end."""
    is_detail: bool = False
    """True for what Markdown, whose first file is one page, puts into a second file."""

    @property
    def has_content(self) -> bool:
        """True if it has more than paragraphs."""
        return bool(self.points or self.tables or self.code or self.charts)

    def limited(self) -> Section:
        """The same section with its first MAX_TABLES tables, and a sentence if it has more."""
        if len(self.tables) <= MAX_TABLES:
            return self
        note = f"The first {MAX_TABLES} tables are shown; report.csv has every measurement."
        paragraphs, tables = [*self.paragraphs, note], self.tables[:MAX_TABLES]
        return replace(self, paragraphs=paragraphs, tables=tables)


@dataclass(frozen=True)
class KeyFigure:
    """A figure that answers the question of a report: "Longest", "2.06M tokens", and its limit."""

    label: str
    value: str
    words: str = ""


@dataclass(frozen=True)
class Document:
    """A report.

    figures: its answer, in at most MAX_FIGURES figures.
    make_data: builds `data`, the tidy table for programs, at its first use.
    has_rows: the records have rows for this kind of report.
    """

    kind: str
    title: str
    paragraphs: Sequence[str]
    sections: Sequence[Section]
    make_data: Callable[[], Table] = field(default=lambda: Table("data", (), ()), repr=False)
    has_rows: bool = True
    figures: Sequence[KeyFigure] = ()

    @cached_property
    def data(self) -> Table:
        """The tidy table: one row per measurement."""
        return self.make_data()

    @property
    def stem(self) -> str:
        """Name of the report's files without a suffix."""
        return "report" if self.kind == "summary" else self.kind

    def in_one_file(self) -> Document:
        """The same document without details apart."""
        return replace(self, sections=[replace(s, is_detail=False) for s in self.sections])

    def without_charts(self) -> Document:
        """The same document without charts."""
        return replace(self, sections=[replace(s, charts=()) for s in self.sections])


def format_cell(cell: Cell, kind: ValueKind) -> str:
    """Format a cell: "12.3 ms ±2 %", "1.5 MiB", "128k"; a dash for None."""
    if cell is None:
        return MISSING
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Spread):
        digits = ".0f" if cell.share >= 0.0995 or cell.share == 0 else ".2g"
        return f"{format_cell(cell.value, kind)} ±{cell.share * 100:{digits}} %"
    return _FORMATS[kind](cell) if kind in _FORMATS else f"{cell:g}"


def format_ratio(value: float) -> str:
    """Format a ratio: "1.23×"."""
    return f"{value:,.0f}×" if value >= 1000 else f"{value:.3g}×"


_FORMATS: dict[ValueKind, Callable[[float], str]] = {
    "tokens": lambda value: format_tokens(int(value)),
    "bytes": format_bytes,
    "seconds": format_seconds,
    "flop_rate": lambda value: format_rate(value, "FLOP/s"),
    "byte_rate": lambda value: format_rate(value, "B/s"),
    "share": format_share,
    "ratio": format_ratio,
    "error": "{:.2g}".format,
    "count": "{:,.0f}".format,
}


def build_chart(
    name: str,
    where: str,
    x: Axis | None,
    y: Axis,
    points: Sequence[Point],
    failures: Sequence[Mark] = (),
    guide: Guide | None = None,
    title: str = "",
) -> Chart | None:
    """Build a chart; None without points.

    x: None: each series is a bar.  title: its start, if not the names of the axes.
    """
    if not points:
        return None
    title = title or y.name + (f" against {x.name.lower()}" if x else "")
    title += f": {where[0].lower()}{where[1:]}" if where else ""
    words = _describe(y, points) + (f"; {len(failures)} failed" if failures else "")
    guides = (guide,) if guide and guide.points else ()
    shape: Shape = "lines" if x else "bars"
    x = x or Axis("", "text")
    return Chart(name, title, f"{words}.", x, y, tuple(points), tuple(failures), guides, shape)


def _describe(y: Axis, points: Sequence[Point]) -> str:
    """Describe the points for readers who can't see them."""
    lowest, highest = min(points, key=lambda p: p.y), max(points, key=lambda p: p.y)
    ends = dict.fromkeys(format_cell(p.y, y.kind) for p in (lowest, highest))
    names = len({p.series for p in points})
    words = f"{y.name} of {names} series, from {' to '.join(ends)}"
    if len(points) == 1:
        words = f"{y.name}: {next(iter(ends))}"
    return f"{words} ({highest.series})"
