"""A document as GitHub Markdown: one page, and a second file with the details.

Names and reasons are escaped and can't break a table.
"""

import mmap
import re
import resource
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from longseq_bench.core.units import format_bytes
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import (
    Document,
    Finding,
    KeyFigure,
    Section,
    Table,
    alternative_text,
    format_cell,
)
from longseq_bench.reports.render.csv import slug

MAX_WORDS, REST = 1_200, 60
"""Words of the page, as `wc -w` counts them, and those of its list of the details."""

ENGINE = 65 << 30
"""Address space that the JavaScript engine of vl-convert reserves at its start (B)."""

_SPECIAL = re.compile(r"([\\`*#|>\[\]~$])")
_EDGE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LIST_NUMBER = re.compile(r"^(\d+)([.)])(?=\s|$)")
_LINE_MARK = re.compile(r"^([+=-])")


@FORMATS.register("md")
def render(document: Document) -> Files:
    """`<stem>.md`, `<stem>-details.md`, and `<stem>-charts/NN-name.svg` for each chart.

    The page has the first screen and the sections that fit into MAX_WORDS words, whole and in their
    order. Without a section for the details there is no second file. Where no chart can be drawn,
    the text says why.
    """
    if note := missing_charts(document):
        document = replace(document.without_charts(), paragraphs=[*document.paragraphs, note])
    charts = [chart for section in document.sections for chart in section.charts]
    stem = document.stem
    names = {id(c): f"{stem}-charts/{i:02d}-{slug(c.name)}.svg" for i, c in enumerate(charts, 1)}
    page, details = _split(document, names)
    main, other = f"{stem}.md", f"{stem}-details.md"
    lines = [*_head(document), *_body(page, names, [s.title for s in details], other)]
    files = {main: lines}
    if details:
        titles = [escape(s.title) for s in details if not s.technical]
        titles += ["how it was measured"] * any(s.technical for s in details)
        lines += ["## Details", "", f"[{other}]({other}): {', '.join(titles)}."]
        start = f"# {escape(document.title)}: details", "", f"The answer: [{main}]({main})", ""
        files[other] = [*start, *_body(details, names, [s.title for s in page], main)]
    texts = {name: "\n".join(lines).rstrip() + "\n" for name, lines in files.items()}
    if charts:
        # a machine that only measures may lack what draws charts
        from longseq_bench.reports.render._draw import svg
        from longseq_bench.reports.render._theme import colours

        known: dict[str, str] = {}
        texts |= {names[id(chart)]: svg(chart, colours(chart, known)) for chart in charts}
    return texts


def missing_charts(document: Document) -> str:
    """Return a sentence on why the charts of a document can't be drawn; "" if they can."""
    has_charts = any(section.charts for section in document.sections)
    reason = _find_obstacle() if has_charts else ""
    return f"The charts are left out: {reason}." if reason else ""


@cache
def _find_obstacle() -> str:
    """Return why vl-convert can't draw in this process; "" if it can.

    With too little room for its JavaScript engine it would end the whole process.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        try:  # no memory is used
            mmap.mmap(-1, ENGINE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
        except (OSError, ValueError, OverflowError):
            needed, found = format_bytes(ENGINE), format_bytes(limit)
            return f"they need {needed} of address space, and the limit (`ulimit -v`) is {found}"
    try:
        import vl_convert

        vl_convert.vegalite_to_svg({"mark": "point", "data": {"values": []}})
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception, for example without threads
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"vl-convert-python does not work here ({reason[:200]})"
    return ""


def text(document: Document) -> str:
    """Return a document without charts as one text."""
    return "\n".join([*_head(document), *_body(document.sections, {})]).rstrip() + "\n"


def _split(document: Document, names: Mapping[int, str]) -> tuple[list[Section], list[Section]]:
    """Return the sections of the page and those of the details."""
    page: list[Section] = []
    details: list[Section] = []
    left = MAX_WORDS - REST - _count(_head(document))
    for section in document.sections:
        words = _count(_body([section], names))
        is_kept = words <= left and not section.technical and not section.is_detail
        (page if is_kept else details).append(section)
        left -= words * is_kept
    return page, details


def _count(lines: Iterable[str]) -> int:
    return sum(len(line.split()) for line in lines)


def _head(document: Document) -> Iterator[str]:
    """Yield the title, the paragraphs, links to other reports, and the key figures."""
    yield from (f"# {escape(document.title)}", "")
    for paragraph in document.paragraphs:
        yield from (_line(paragraph), "")
    if document.related:
        links = (f"[{escape(kind)}]({stem}.md)" for kind, stem in document.related)
        yield from (f"Reports of these records: {', '.join(links)}", "")
    if document.figures:
        yield from (*map(_figure, document.figures), "")


def _figure(figure: KeyFigure) -> str:
    words = f", {escape(figure.words)}" if figure.words else ""
    return f"- {escape(figure.label)}: **{escape(figure.value)}**{words}"


def escape(text: str) -> str:
    """Return one line of Markdown that shows exactly this text, also in a table cell."""
    one_line = " ".join(text.split()).replace("&", "&amp;")
    marked = _SPECIAL.sub(r"\\\1", one_line).replace("<", "&lt;")
    return _EDGE_UNDERSCORE.sub(r"\\_", marked)


def _line(text: str) -> str:
    """Escape text at the start of a line, where a dash or a number would start a list."""
    return _LIST_NUMBER.sub(r"\1\\\2", _LINE_MARK.sub(r"\\\1", escape(text)))


def _body(
    sections: Sequence[Section],
    names: Mapping[int, str],
    others: Collection[str] = (),
    file: str = "",
) -> Iterator[str]:
    """Yield the lines of sections.

    names: files of charts by id.  others: titles of sections that are in another file.
    """
    for section in sections:
        yield from (f"## {escape(section.title)}", "")
        for paragraph in section.paragraphs:
            yield from (_line(paragraph), "")
        for point in section.points:
            rows = point.rows if isinstance(point, Finding) else ""
            place = f"{file if rows in others else ''}#{slug(rows)}"
            yield f"- {_line(point)}" + (f" ([rows]({place}))" if rows else "")
        if section.points:
            yield ""
        for chart in section.charts:
            from longseq_bench.reports.render._draw import notes

            yield from (f"![{escape(alternative_text(chart))}]({names[id(chart)]})", "")
            if signs := " ".join(notes(chart)):
                yield from (_line(signs), "")
        for table in section.tables:
            yield from _table(table)
        if section.code:
            yield from _code(section.code)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield from (f"### {escape(table.title)}", "")
    yield _row([escape(column.name) for column in table.columns])
    yield _row(["---" if column.kind == "text" else "---:" for column in table.columns])
    for row in table.rows:
        cells = zip(row, table.columns, strict=True)
        yield _row([escape(format_cell(cell, column.kind)) for cell, column in cells])
    yield ""


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(lines: Sequence[str]) -> Iterator[str]:
    text = "\n".join(lines)
    # A fence must be longer than any run of backticks inside it.
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (fence, text, fence, "")
