"""A document as GitHub Markdown. Names and reasons are escaped and can't break a table."""

import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from subprocess import run

from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import Document, KeyFigure, Section, Table, format_cell
from longseq_bench.reports.render.csv import slug

_SPECIAL = re.compile(r"([\\`*#|>\[\]~$])")
_EDGE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LIST_NUMBER = re.compile(r"^(\d+)([.)])(?=\s|$)")
_LINE_MARK = re.compile(r"^([+=-])")


@FORMATS.register("md")
def render(document: Document) -> Files:
    """`<stem>.md`, `<stem>-details.md`, and `<stem>-charts/NN-name.svg` for each chart.

    The first is one page with the answer and links to the details; a document without details has
    no second file. Where no chart can be drawn, the text says why.
    """
    if note := missing_charts(document):
        document = replace(document.without_charts(), paragraphs=[*document.paragraphs, note])
    charts = [chart for section in document.sections for chart in section.charts]
    names = {
        id(c): f"{document.stem}-charts/{i:02d}-{slug(c.name)}.svg" for i, c in enumerate(charts, 1)
    }
    files: Files = {f"{document.stem}.md": _page(document, names)}
    if details := [section for section in document.sections if section.is_detail]:
        back = [f"# {escape(document.title)}: details", "", f"[The answer]({document.stem}.md)", ""]
        lines = [*back, *(line for one in details for line in _section(one, names))]
        files[f"{document.stem}-details.md"] = _join(lines)
    if charts:
        # a machine that only measures may lack what draws charts
        from longseq_bench.reports.render._draw import colours, svg

        known: dict[str, str] = {}
        files |= {names[id(chart)]: svg(chart, colours(chart, known)) for chart in charts}
    return files


def missing_charts(document: Document) -> str:
    """Return a sentence on why the charts of a document can't be drawn; "" if they can."""
    has_charts = any(section.charts for section in document.sections)
    reason = _find_obstacle() if has_charts else ""
    return f"The charts are left out: {reason}." if reason else ""


@cache
def _find_obstacle() -> str:
    """Return why vl-convert can't draw here; "" if it can.

    Another process tries: with too little address space its engine ends the whole process.
    """
    tried = run([sys.executable, "-P", "-c", _TRY], capture_output=True, text=True, check=False)
    if not tried.returncode:
        return ""
    reason = " ".join(tried.stderr.split())[:100]
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return f"vl-convert-python does not work here ({reason})"
    return f"vl-convert-python needs 65 GiB of address space (`ulimit -v`), and ends with: {reason}"


_TRY = """
import vl_convert
vl_convert.vegalite_to_svg({"mark": "point", "data": {"values": []}})
"""


def _page(document: Document, names: Mapping[int, str]) -> str:
    """The first file: all that is no detail, and a link to each section of details."""
    lines = [f"# {escape(document.title)}", ""]
    for paragraph in document.paragraphs:
        lines += [_line(paragraph), ""]
    if document.figures:
        lines += [*map(_figure, document.figures), ""]
    for section in document.sections:
        if not section.is_detail:
            lines += _section(section, names)
    if linked := [section for section in document.sections if section.is_detail]:
        lines += ["## Details", ""]
        place = f"{document.stem}-details.md#"
        for one in linked:
            github_anchor = re.sub(r"[^\w -]", "", one.title.lower()).replace(" ", "-")
            lines.append(f"- [{escape(one.title)}]({place}{github_anchor}){_content(one)}")
    return _join(lines)


def _content(section: Section) -> str:
    """Return what a section has: ": 12 rows, 2 charts", and its first point; "" if it has none."""
    counts = {"row": sum(len(table.rows) for table in section.tables), "chart": len(section.charts)}
    size = ", ".join(f"{n:,} {name}{'s' * (n > 1)}" for name, n in counts.items() if n)
    return "".join(f": {escape(words)}" for words in (size, *section.points[:1]) if words)


def _join(lines: Sequence[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


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


def _section(section: Section, names: Mapping[int, str]) -> Iterator[str]:
    if section.folded:
        yield from ("<details>", f"<summary>{escape(section.title)}</summary>", "")
    else:
        yield from (f"## {escape(section.title)}", "")
    for paragraph in section.paragraphs:
        yield from (_line(paragraph), "")
    yield from (f"- {_line(point)}" for point in section.points)
    if section.points:
        yield ""
    for chart in section.charts:
        from longseq_bench.reports.render._draw import notes

        yield from (f"![{escape(f'{chart.title}. {chart.description}')}]({names[id(chart)]})", "")
        if signs := " ".join(notes(chart)):
            yield from (_line(signs), "")
    for table in section.tables:
        yield from _table(table)
    if section.code:
        yield from ("```", *section.code, "```", "")
    if section.folded:
        yield from ("</details>", "")


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
