"""The limits of a report that a reader takes in within a minute, checked on documents.

violations(document)          sizes: first screen, findings, colours, labels, alt texts, no null
mixed_limits(document, ...)   rows under different budgets, modes or dtypes that look alike
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from longseq_bench.analysis.row import Row
from longseq_bench.core.units import format_bytes
from longseq_bench.reports.document import (
    Chart,
    Document,
    Section,
    Spread,
    Table,
    alternative_text,
)
from longseq_bench.reports.groups import format_limit
from longseq_bench.reports.render._vega import PALE, colours

MAX_WORDS, MAX_ROWS, MAX_RANKED, MAX_FIGURES = 200, 8, 12, 5
"""Of the first screen: words outside its table, rows of its table (and of a ranked one)."""
MAX_FINDINGS, MAX_FINDING, MAX_SENTENCES = 5, 25, 2
"""Of a section: findings, words of one, and sentences of a paragraph."""
MAX_SERIES, MAX_LABEL, MAX_ALT = 8, 40, 25

_EMPTY = re.compile(r"\b(null|None)\b")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z]|\s*$)")


def count_words(texts: Iterable[str]) -> int:
    return sum(len(text.split()) for text in texts)


def violations(document: Document) -> list[str]:
    """The limits that a document exceeds: place, limit, and the text that exceeds it."""
    found = [*_first_screen(document), *(v for s in document.sections for v in _section(s))]
    return [f"{document.kind}: {one}" for one in found]


def _first_screen(document: Document) -> Iterator[str]:
    first = document.sections[0]
    figures = [text for f in document.figures for text in (f.label, f.value, f.words)]
    titles = [chart.title for chart in first.charts]
    words = count_words(
        [document.title, *document.paragraphs, *figures, *first.paragraphs, *first.points, *titles]
    )
    if words > MAX_WORDS:
        yield f"first screen: {words} words"
    if len(document.figures) > MAX_FIGURES:
        yield f"first screen: {len(document.figures)} key figures"
    if len(first.charts) > 1 or len(first.tables) > 1:
        yield f"{first.title}: {len(first.charts)} charts and {len(first.tables)} tables come first"
    rows = sum(len(table.rows) for table in first.tables)
    if rows > (MAX_RANKED if document.kind == "implementations" else MAX_ROWS):
        yield f"{first.title}: {rows} rows come first"
    for text in (document.title, *document.paragraphs, *figures):
        if _EMPTY.search(text):
            yield f"first screen: empty value: {text}"
    for figure in document.figures:
        if len(figure.label) > MAX_LABEL:
            yield f"first screen: long label: {figure.label}"


def _section(section: Section) -> Iterator[str]:
    place = section.title
    if len(section.points) > MAX_FINDINGS:
        yield f"{place}: {len(section.points)} findings"
    for text in section.points:
        if count_words([text]) > MAX_FINDING:
            yield f"{place}: finding of {count_words([text])} words: {text}"
    for text in section.paragraphs:
        if (n := len(_SENTENCE_END.findall(text))) > MAX_SENTENCES:
            yield f"{place}: paragraph of {n} sentences: {text}"
    for chart in section.charts:
        yield from (f"{place}, chart {chart.title!r}: {one}" for one in _chart(chart))
    labels = dict.fromkeys(_labels(section))
    yield from (f"{place}: label of {len(x)} letters: {x}" for x in labels if len(x) > MAX_LABEL)
    if not section.technical:  # these have options and configs as they were written
        texts = dict.fromkeys([*_texts(section), *labels])
        yield from (f"{place}: empty value: {text}" for text in texts if _EMPTY.search(text))


def _labels(section: Section) -> Iterator[str]:
    """Names of series, guides and columns, and the implementations of tables."""
    for chart in section.charts:
        yield from (*chart.series, *(guide.name for guide in chart.guides))
    for table in section.tables:
        yield from (column.name for column in table.columns)
        named = [i for i, column in enumerate(table.columns) if column.name == "Implementation"]
        yield from (str(row[i]) for row in table.rows for i in named)


def _texts(section: Section) -> Iterator[str]:
    yield from (section.title, *section.paragraphs, *section.points)
    for chart in section.charts:
        yield from (chart.title, chart.description)
        yield from (one.words for one in (*chart.points, *chart.failures))
    for table in section.tables:
        yield from (table.title, *(c for row in table.rows for c in row if isinstance(c, str)))


def _chart(chart: Chart) -> Iterator[str]:
    coloured = {name for name, colour in colours(chart).items() if colour != PALE}
    if chart.shape != "bars" and len(coloured) > MAX_SERIES:
        yield f"{len(coloured)} series in colour"
    if not chart.points:
        yield "no points"
    if (n := count_words([alt := alternative_text(chart)])) > MAX_ALT:
        yield f"alternative text of {n} words: {alt}"


# ---- rows under different limits ----------------------------------------------------------------

_HEADINGS = {
    "time_budget": r"limit|time budget|\bbudgets?\b|workload",
    "memory_budget": r"memory budget|\bbudgets?\b|workload",
    "mode": r"mode|\bpass\b|workload",
    "dtype": r"dtype|type|workload",
}
"""Fields that must be stated where rows differ, and columns that state them."""


def _words(field: str, value: Any) -> tuple[str, ...]:
    """Words of which one states the value."""
    if field == "time_budget":
        return ("no time limit", "no limit") if value is None else (format_limit(value),)
    if field == "memory_budget":
        size = "no memory budget" if value is None else format_bytes(value).lower()
        return (size,)
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "train": "training"}
    return str(value), short.get(value, str(value))


class Line(NamedTuple):
    """A row of a table or a bar: its text, and the measured rows that it may show."""

    text: str
    rows: list[Row]


_VALUES = ("max_tokens", "time_s", "peak_bytes", "max_error")
"""Fields that together identify a row."""
Index = Mapping[tuple[str, float], Sequence[Row]]


def index_rows(rows: Sequence[Row]) -> Index:
    """Measured rows by their label and one of their values."""
    found: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in rows:
        values = {getattr(row, name, None) for name in _VALUES} - {None}
        for at in product({row.label, row.name}, values):
            found[at].append(row)
    return found


def find_rows(index: Index, names: Iterable[str], values: Iterable[float]) -> list[Row]:
    """The rows of these names that have most of these values; none without any."""
    hits = [row for at in product(names, values) for row in index.get(at, ())]
    counts = Counter(map(id, hits))
    most = max(counts.values(), default=0)
    return [row for row in {id(row): row for row in hits}.values() if counts[id(row)] == most]


def mixed_limits(document: Document, *tables: Sequence[Row]) -> list[str]:
    """Tables and bars whose lines show rows under different limits, without stating these.

    tables: the rows of the report, one sequence per type. Failures are a list, not a comparison.
    """
    indices = [index_rows(rows) for rows in tables]
    return [
        f"{document.kind}: {section.title}, {title!r}: {field} differs, but is not stated: {texts}"
        for section in document.sections
        if not section.technical and section.title != "Failures"
        for title, headings, lines in _compared(section, indices)
        for field, pattern in _HEADINGS.items()
        if not any(re.search(pattern, heading.lower()) for heading in headings)
        for texts in [_unstated(field, title, lines)]
        if texts
    ]


def _compared(
    section: Section, indices: Sequence[Index]
) -> Iterator[tuple[str, list[str], list[Line]]]:
    """The title, the headings and the lines of each table and bar chart, by type of row."""
    for table in section.tables:
        cells = [_cells(table, row) for row in table.rows]
        for index in indices:
            lines = [Line(text, find_rows(index, names, values)) for text, names, values in cells]
            yield table.title, [column.name for column in table.columns], lines
    for chart in section.charts:
        if chart.shape == "bars":
            for index in indices:
                lines = [
                    Line(
                        f"{getattr(p, 'facet', '')} {p.series} {p.words}",
                        find_rows(index, _names(p.series), [p.y]),
                    )
                    for p in chart.points
                ]
                yield chart.title, [], lines


def _cells(table: Table, row: Sequence[Any]) -> tuple[str, list[str], list[float]]:
    """The text of a line, the names in it, and its values."""
    texts = [cell for cell in row if isinstance(cell, str)]
    numbers = [cell.value if isinstance(cell, Spread) else cell for cell in row]
    counts = (re.match(r"\d[\d,]*(?= |$)", text) for text in texts)
    numbers += [int(found[0].replace(",", "")) for found in counts if found]
    names = [name for text in texts for name in _names(text)]
    return " ".join(texts), names, [number for number in numbers if number is not None]


def _names(text: str) -> list[str]:
    """The names that a label may begin with."""
    return list(dict.fromkeys((text, text.partition(",")[0], text.partition(" (")[0])))


def _unstated(field: str, title: str, lines: Sequence[Line]) -> list[str]:
    """The lines that state no value of the field, if they can't all have the same one."""
    silent = []
    for line in lines:
        values = {getattr(row, field) for row in line.rows}
        text = f"{title} {line.text}".lower()
        stated = any(word in text for value in values for word in _words(field, value))
        if values and not stated:
            silent.append((line.text, values))
    if len(silent) < 2 or set.intersection(*(values for _, values in silent)):
        return []
    return [f"{text} ({', '.join(map(str, values))})" for text, values in silent[:3]]
