"""Print documents in a terminal, as wide as it is: `longseq report --format terminal`.

A table has as many columns as there is room for, and a chart is a table of its values. Names and
reasons are printed literally: markup and escape sequences in them have no effect.
"""

import io
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from longseq_bench.core.errors import one_line, remove_control
from longseq_bench.reports import document as doc
from longseq_bench.reports.document import Chart, Column, Document, Table, format_cell

MAX_LINE, MAX_ROWS, MAX_X = 100, 200, 20
"""Maximum width of a sentence's lines (characters); rows of a table; values of x of a chart."""
GAP, MIN_LABEL, MIN_WORDS, MAX_WORD = 2, 20, 12, 32
"""Space between columns; widths to which the first and other text columns wrap, and of a word."""
HINT = "a wider terminal or --format md has them"
_WORDS = {
    "green": "ok, faster, less, longer, mended",
    "red": "slower, more, shorter, broken, missing, crashed, wrong, error, hang",
    "yellow": "oom, out of memory, timeout, undecided, unstable, too noisy, note",
}
STYLES = {word: style for style, words in _WORDS.items() for word in words.split(", ")}
"""Colours of statuses and verdicts, in any column but the first."""
Block = list[Text | RichTable]


def plain(text: str, style: str = "") -> Text:
    """Return the text on one line in one style; markup in it has no effect."""
    return Text(one_line(text), style)


def print_document(document: Document, screen: Console, hint: str = HINT) -> None:
    """Print a report; hint: where to find what a narrow terminal leaves out."""
    for i, block in enumerate(_blocks(document, screen, hint)):
        if i:
            screen.print()
        for line in block:
            # code is not wrapped, so that it can be copied; all else is as wide as the screen
            screen.print(line, soft_wrap=isinstance(line, Text))


def as_text(document: Document, hint: str) -> str:
    """Return a report as lines without colours, for `print`."""
    file = io.StringIO()
    screen = Console(file=file, width=MAX_LINE, color_system=None, force_jupyter=False)
    print_document(document, screen, hint)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _blocks(document: Document, screen: Console, hint: str) -> Iterator[Block]:
    """Yield the parts of a document that have an empty line between them."""
    blocks = [_wrap(paragraph, screen) for paragraph in document.paragraphs]
    key: Block = []
    for one in document.figures:
        words = ", ".join(filter(None, (f"{one.label}: {one.value}", one.words)))
        key += _wrap(words, screen, style="bold")
    yield from _titled(document.title, "═", [*blocks, key], screen)
    for section in document.sections:
        yield from _titled(section.title, "─", _section_blocks(section, screen, hint), screen)


def _titled(title: str, line: str, blocks: Iterable[Block], screen: Console) -> Iterator[Block]:
    """Yield the blocks that are not empty; a title is above the first."""
    heading = _wrap(title, screen, style="bold")
    if heading:
        heading.append(Text(line * min(len(one_line(title)), screen.width, MAX_LINE), "dim"))
    for block in blocks:
        if block:
            yield [*heading, *block]
            heading = []
    if heading:
        yield heading


def _section_blocks(section: doc.Section, screen: Console, hint: str) -> Iterator[Block]:
    yield from (_wrap(paragraph, screen) for paragraph in section.paragraphs)
    yield [line for point in section.points for line in _wrap(point, screen, "• ")]
    for chart in section.charts:
        title = [*_wrap(chart.title, screen, style="bold"), *_wrap(chart.description, screen)]
        tables = [_chart_table(chart, facet, series) for facet, series in chart.facets.items()]
        yield [*title, *(line for one in tables for line in _table_lines(one, screen, hint))]
    yield from (_table_lines(table, screen, hint) for table in section.tables)
    yield [Text(remove_control(line.expandtabs())) for line in section.code]


def _wrap(sentence: str, screen: Console, mark: str = "", style: str = "") -> Block:
    """Return a sentence in lines that are not too long; those after the mark are indented."""
    width = max(1, min(MAX_LINE, screen.width) - len(mark))
    lines: Block = []
    for line in plain(sentence, style).wrap(screen, width, overflow="fold") if sentence else ():
        line.rstrip()
        lines.append(Text(" " * len(mark) if lines else mark).append(line))
    return lines


@dataclass(frozen=True)
class _TerminalColumn:
    """A column of formatted cells; those with the lowest priority are left out first, together.

    min_width: the smallest at which no word or figure is broken.
    """

    heading: str
    cells: list[Text]
    width: int
    min_width: int
    is_text: bool
    priority: tuple[float, ...]


def _column(i: int, column: Column, cells: tuple[doc.Cell, ...]) -> _TerminalColumn:
    """Format a column.

    Without a declared priority, empty columns are left out first, then those with one value in all
    rows, then from the right; medians last.
    """
    texts = [plain(format_cell(cell, column.kind)) for cell in cells[:MAX_ROWS]]
    for text in texts if i else ():
        text.stylize(STYLES.get(text.plain, ""))
    heading, is_text = one_line(column.name), column.kind == "text"
    width = max([1, *map(len, heading.split()), *(text.cell_len for text in texts)])
    longest = max((len(word) for text in texts for word in text.plain.split()), default=0)
    wrapped = min(width, max(MIN_WORDS if i else MIN_LABEL, min(MAX_WORD, longest)))
    priority: tuple[float, ...] = (-0.5, -i)
    if all(cell is None for cell in cells):
        priority = (-1, -i)
    elif column.priority is not None:
        priority = (column.priority,)
    elif len(cells) > 1 and len(set(cells)) == 1:
        priority = (-0.75, -i)
    elif any(isinstance(cell, doc.Spread) for cell in cells):
        priority = (-0.25, -i)
    return _TerminalColumn(heading, texts, width, wrapped if is_text else width, is_text, priority)


def _table_lines(table: Table, screen: Console, hint: str) -> Block:
    """Return a table that fits the screen, its title, and sentences on what it leaves out.

    The first column is always kept.
    """
    cells = zip(*table.rows, strict=True) if table.rows else [()] * len(table.columns)
    columns = [_column(i, *pair) for i, pair in enumerate(zip(table.columns, cells, strict=True))]
    shown = list(columns)
    while len(shown) > 1 and sum(c.min_width + GAP for c in shown) - GAP > screen.width:
        lowest = min(column.priority for column in shown[1:])
        shown = [shown[0], *(column for column in shown[1:] if column.priority != lowest)]
    missing = sum(column.width - column.min_width for column in shown)
    left = screen.width + GAP - sum(column.min_width + GAP for column in shown)
    fitted = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column in shown:
        more = (column.width - column.min_width) * min(1.0, left / max(1, missing))
        fitted.add_column(
            Text(column.heading),
            width=max(1, min(column.min_width + int(more), screen.width)),
            justify="left" if column.is_text else "right",
            overflow="fold",
        )
    for row in zip(*(column.cells for column in shown), strict=True):
        fitted.add_row(*row)
    lines = [*_wrap(table.title, screen, style="bold"), fitted]
    if len(table.rows) > MAX_ROWS:
        count = f"{MAX_ROWS} of {len(table.rows):,} rows"
        lines += _wrap(f"the first {count}: {hint}", screen, style="dim")
    kept = {id(column) for column in shown}
    if left_out := [column.heading for column in columns if id(column) not in kept]:
        lines += _wrap(f"no room for {', '.join(left_out)}: {hint}", screen, style="dim")
    return lines


def _chart_table(chart: Chart, facet: str, series: list[str]) -> Table:
    """Return a row per series, the best ones of lines, and a column per x, the last ones kept.

    Bars have one column of values, and one per guide. Guides of other charts are rows.
    """
    has_bars, cells = chart.shape == "bars", dict[tuple[str, Hashable], str]()
    for p in (point for point in chart.points if point.facet == facet):
        value = p.y if p.low is None or p.high is None else doc.Spread(p.y, p.low, p.high)
        cells[p.series, chart.y.name if has_bars else p.x] = format_cell(value, chart.y.kind)
    for mark in (mark for mark in chart.failures if mark.facet == facet):
        cells[mark.series, chart.y.name if has_bars else mark.x] = mark.words
    names = series if chart.shape in ("bars", "heat") else chart.find_best(series)
    title = f"{len(names)} of {len(series)} series" if len(names) < len(series) else ""
    for guide in chart.guides:
        name = guide.name + (" (computed)" if guide.description == doc.COMPUTED else "")
        names = names if has_bars else [*names, name]
        for p in (point for point in guide.points if point.facet == facet):
            cells[(p.series, name) if has_bars else (name, p.x)] = format_cell(p.y, chart.y.kind)
    xs = list(dict.fromkeys(x for name, x in cells if name in names))
    xs = xs if has_bars else sorted(xs)[-MAX_X:]  # type: ignore[type-var]
    heads = [str(x) if has_bars else format_cell(x, chart.x.kind) for x in xs]  # type: ignore[arg-type]
    columns = [Column(facet or ("" if has_bars else chart.x.name))]
    columns += [Column(head, "count", -i if has_bars else i) for i, head in enumerate(heads)]
    rows = ((name, *(cells.get((name, x)) for x in xs)) for name in dict.fromkeys(names))
    return Table(title, tuple(columns), tuple(rows))
