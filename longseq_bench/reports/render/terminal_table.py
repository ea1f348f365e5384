"""Tables that fit the terminal: columns are left out by priority, labels wrap, figures don't."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from longseq_bench.reports.render.terminal_text import plain

GAP = 2
MIN_LABEL, MIN_WORDS = 20, 12
"""Minimum widths to which the first column and other text columns wrap between words."""
MAX_WORD = 32
"""Words up to this width are broken only as a last resort."""

Priority = tuple[float, ...]


@dataclass(frozen=True)
class TerminalColumn:
    """A column of formatted cells, each on one line; the heading may have several lines.

    words: left-aligned and wrapped; else right-aligned and never wrapped.
    priority: the columns with the lowest one are left out first, together.
    """

    heading: str
    cells: Sequence[Text]
    words: bool = False
    priority: Priority = ()
    min_width: int = MIN_WORDS

    @cached_property
    def width(self) -> int:
        """The width without any wrapping."""
        headings = map(len, self.heading.split("\n"))
        return max([*headings, *(cell.cell_len for cell in self.cells)])

    @cached_property
    def wrapped_width(self) -> int:
        """The smallest width at which no word is broken."""
        if not self.words:
            return self.width
        longest = max((len(w) for cell in self.cells for w in cell.plain.split()), default=0)
        return min(self.width, max(self.min_width, min(MAX_WORD, longest)))


@dataclass(frozen=True)
class TerminalTable:
    """A table that is fitted when it is printed. The first column is always kept.

    hint: where to find the columns without room.
    """

    columns: Sequence[TerminalColumn]
    hint: str

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[Segment | Text]:
        shown = _fitting(self.columns, options.max_width)
        widths = _widths(shown, options.max_width)
        headings = [Text(column.heading, "table.header") for column in shown]
        # rich's own table takes ten times as long for thousands of rows
        for cells in chain([headings], zip(*(column.cells for column in shown), strict=True)):
            for line in _lines(cells, shown, widths, console):
                yield from line.render(console, end="\n")
        kept = {id(column) for column in shown}
        if left_out := [column for column in self.columns if id(column) not in kept]:
            names = ", ".join(c.heading.replace("\n", " ") or "the chart" for c in left_out)
            sentence = plain(f"no room for {names}: {self.hint}", "dim")
            for line in sentence.wrap(console, options.max_width):
                line.rstrip()
                yield line


def _fitting(columns: Sequence[TerminalColumn], room: int) -> list[TerminalColumn]:
    shown = list(columns)
    while len(shown) > 1 and sum(c.wrapped_width + GAP for c in shown) - GAP > room:
        lowest = min(column.priority for column in shown[1:])
        shown = [shown[0], *(column for column in shown[1:] if column.priority != lowest)]
    return shown


def _widths(shown: Sequence[TerminalColumn], room: int) -> list[int]:
    """Return the width of each column: its minimum, and its share of the remaining room."""
    minimum = [column.wrapped_width for column in shown]
    left = room - sum(minimum) - GAP * (len(shown) - 1)
    if left < 0:  # the first column is alone
        return [max(1, room)]
    missing = [column.width - width for column, width in zip(shown, minimum, strict=True)]
    share = min(1.0, left / sum(missing)) if any(missing) else 1.0
    return [width + int(more * share) for width, more in zip(minimum, missing, strict=True)]


def _lines(
    cells: Sequence[Text], shown: Sequence[TerminalColumn], widths: Sequence[int], console: Console
) -> Iterator[Text]:
    """Yield the lines of one row, as many as its longest cell takes."""
    wrapped = [
        [*cell.wrap(console, width, overflow="fold")]
        if cell.cell_len > width or "\n" in cell.plain
        else [cell]
        for cell, width in zip(cells, widths, strict=True)
    ]
    for parts in zip_longest(*wrapped, fillvalue=Text()):
        line, start = Text(), 0
        for part, column, width in zip(parts, shown, widths, strict=True):
            part.rstrip()
            indent = 0 if column.words else width - part.cell_len
            if part.plain:
                line.append(" " * (start + indent - line.cell_len))
                line.append_text(part)
            start += width + GAP
        yield line
