"""Print documents in a terminal, as wide as it is: `longseq report --format terminal`.

A wide table of few rows is turned: a line is a field. Others have as many columns as there is room
for; of a chart the description is printed. Names and reasons are printed literally: markup and
escape sequences in them have no effect.
"""

import io
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.table import Table as RichTable
from rich.text import Text

from longseq_bench.core.errors import keep_lines, one_line
from longseq_bench.reports.document import Column, Document, Section, Table, format_cell

MAX_LINE, MAX_ROWS = 100, 200
"""Maximum width of a sentence's lines (characters), and rows of a table."""
GAP, LABEL, MAX_WORD = 2, 20, 32
"""Space between columns; widths to which the first column wraps, and of an unbroken word."""
MAX_TURNED = 3
"""Rows of a table that is turned where it does not fit."""
HINT = "a wider terminal or --format md has them"
_WORDS = {
    "green": "ok, faster, less, longer, mended",
    "red": "slower, more, shorter, broken, missing, crashed, wrong, error, hang",
    "yellow": "oom, out of memory, timeout, undecided, unstable, too noisy, note",
}
STYLES = {word: style for style, words in _WORDS.items() for word in words.split(", ")}
"""Colours of statuses and verdicts, in any column but the first."""
Lines = Sequence[RenderableType]


def plain(text: str, style: str = "") -> Text:
    """Return the text on one line in one style; markup in it has no effect."""
    return Text(one_line(text), style)


def print_document(document: Document, screen: Console, hint: str = HINT) -> None:
    """Print a report; hint: where to find what a narrow terminal leaves out."""
    for i, block in enumerate(_blocks(document, screen, hint)):
        if i:
            screen.print()
        for part in block:
            # code is not wrapped, so that it can be copied; all else is as wide as the screen
            screen.print(part, soft_wrap=isinstance(part, Text))


def as_text(document: Document, hint: str) -> str:
    """Return a report as lines without colours, for `print`."""
    file = io.StringIO()
    screen = Console(file=file, width=MAX_LINE, color_system=None, force_jupyter=False)
    print_document(document, screen, hint)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _blocks(document: Document, screen: Console, hint: str) -> Iterator[Lines]:
    """Yield the parts of a document that have an empty line between them."""
    figures = [
        _say(", ".join(filter(None, (f"{one.label}: {one.value}", one.words))), "bold")
        for one in document.figures
    ]
    start = [*([_say(paragraph)] for paragraph in document.paragraphs), figures]
    yield from _titled(document.title, "═", start, screen)
    for section in document.sections:
        if not section.is_detail:
            blocks = list(_section_blocks(section, screen, hint))
            yield from _titled(section.title, "─", blocks, screen)
    if more := sum(section.is_detail for section in document.sections):
        yield [_say(f"{more} sections of details: --format md or html.", "dim")]


def _titled(title: str, line: str, blocks: Sequence[Lines], screen: Console) -> Iterator[Lines]:
    """Yield the blocks that are not empty; a title is above the first."""
    rule = line * min(len(one_line(title)), screen.width, MAX_LINE)
    heading = [_say(title, "bold"), _say(rule, "dim")] if title else []
    for block in [block for block in blocks if block] or [heading] * bool(heading):
        yield [*heading, *block] if block is not heading else heading
        heading = []


def _section_blocks(section: Section, screen: Console, hint: str) -> Iterator[Lines]:
    yield from ([_say(paragraph)] for paragraph in section.paragraphs)
    points = RichTable.grid(padding=(0, 1, 0, 0))
    for point in section.points:
        points.add_row("•", plain(point))
    yield [Constrain(points, MAX_LINE)] if section.points else []
    for chart in section.charts:
        yield [_say(chart.title, "bold"), _say(chart.description)]
    for table in section.tables:
        yield _table(table, screen, hint)
    yield [Text(keep_lines(line.expandtabs())) for line in section.code]


def _say(sentence: str, style: str = "") -> Constrain:
    return Constrain(plain(sentence, style), MAX_LINE)


def _table(table: Table, screen: Console, hint: str) -> Lines:
    """Return a table that fits the screen, its title, and sentences on what it leaves out.

    The first column is always kept.
    """
    every = range(len(table.columns))
    filled = [i for i in every if not i or any(row[i] is not None for row in table.rows)]
    sizes = {i: screen.measure(_draw(table, {i: None})) for i in filled}
    least = {i: min(size.minimum, MAX_WORD) for i, size in sizes.items()}
    room = screen.width + GAP
    is_wide = sum(least.values()) + GAP * len(filled) > room
    if is_wide and len(table.rows) <= min(MAX_TURNED, len(filled) - 2):
        return _table(_turn(table, filled[1:]), screen, hint)
    priority = {i: table.columns[i].priority for i in filled}
    ranks = {i: -i if rank is None else rank for i, rank in priority.items()}
    kept = filled
    while len(kept) > 1 and sum(least[i] + GAP for i in kept) > room:
        lowest = min(ranks[i] for i in kept[1:])
        kept = [i for i in kept if not i or ranks[i] != lowest]
    missing = sum(sizes[i].maximum - least[i] for i in kept)
    share = min(1.0, (room - sum(least[i] + GAP for i in kept)) / max(1, missing))
    widths = {i: least[i] + int((sizes[i].maximum - least[i]) * share) for i in kept}
    lines: list[RenderableType] = [_say(table.title, "bold")] if table.title else []
    lines.append(_draw(table, widths))
    if len(table.rows) > MAX_ROWS:
        count = f"{MAX_ROWS} of {len(table.rows):,} rows"
        lines.append(_say(f"the first {count}: {hint}", "dim"))
    if dropped := [table.columns[i].name for i in filled if i not in kept]:
        left = len(dropped) - 2
        more = ["1 more column" if left == 1 else f"{left} more columns"] if left > 0 else []
        lines.append(_say(f"no room for {', '.join([*dropped[:2], *more])}: {hint}", "dim"))
    return lines


def _turn(table: Table, fields: Sequence[int]) -> Table:
    """Return a table with a line for each of these columns, and a column for each row."""
    texts = [
        [format_cell(cell, column.kind) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    columns = (table.columns[0], *(Column(row[0]) for row in texts))
    lines = tuple((table.columns[i].name, *(row[i] for row in texts)) for i in fields)
    return Table(table.title, columns, lines)


def _draw(table: Table, widths: Mapping[int, int | None]) -> RichTable:
    """Return the first rows of the columns that have a width. Words wrap and figures do not."""
    drawn = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    columns: list[list[Text]] = []
    for i, width in widths.items():
        column, is_text = table.columns[i], table.columns[i].kind == "text"
        cells = [plain(format_cell(row[i], column.kind)) for row in table.rows[:MAX_ROWS]]
        for cell in cells if i else ():
            cell.stylize(STYLES.get(cell.plain, ""))
        columns.append(cells)
        longest = max((cell.cell_len for cell in cells), default=1)
        drawn.add_column(
            plain(column.name),
            justify="left" if is_text else "right",
            overflow="fold",
            width=width and max(1, width),
            min_width=(0 if i else min(longest, LABEL)) if is_text else longest,
        )
    for row in zip(*columns, strict=True):
        drawn.add_row(*row)
    return drawn
