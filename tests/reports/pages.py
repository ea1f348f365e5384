"""A Markdown report read back: its sections, paragraphs, points, pictures' words, tables, code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ESCAPED = re.compile(r"\\(.)")
_PICTURE = re.compile(r"!\[(.*)\]\((\S+)\)")
_BAR = re.compile(r"(?<!\\) \| ")


@dataclass
class Shown:
    """A table as it is shown: a second column of one name has " (2)" behind it."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Part:
    """A section; the head of the page is one without a title."""

    title: str = ""
    paragraphs: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    tables: list[Shown] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def plain(text: str) -> str:
    """Text as a reader sees it."""
    return _ESCAPED.sub(r"\1", text.replace("&lt;", "<")).replace("&amp;", "&")


def read(markdown: str) -> list[Part]:
    """The parts of a page, in order, and every line in one of them."""
    parts, heading, fence = [Part()], "", ""
    table: Shown | None = None
    for line in markdown.splitlines():
        part = parts[-1]
        if fence or line.startswith("```"):
            if fence and line != fence:
                part.code.append(line)
            fence = "" if line == fence else fence or line
        elif line.startswith("# "):
            part.paragraphs.append(plain(line[2:]))
        elif line.startswith("## "):
            parts.append(Part(plain(line[3:])))
        elif line.startswith("### "):
            heading = plain(line[4:])
        elif line.startswith("| "):
            table, heading = _row(line, part, table, heading), ""
        elif line.startswith("- "):
            part.points.append(plain(line[2:]))
        elif picture := _PICTURE.fullmatch(line):
            part.pictures.append(plain(picture[1]))
        elif line:
            part.paragraphs.append(plain(line))
        if not line.startswith(("| ", "### ")) and line:
            heading = ""
        if not line.startswith("| "):
            table = None
    return parts


def _row(line: str, part: Part, table: Shown | None, heading: str) -> Shown:
    cells = [plain(cell) for cell in _BAR.split(line[2:].removesuffix(" |"))]
    if table is None:
        names = [f"{c} (2)" if c in cells[:i] else c for i, c in enumerate(cells)]
        part.tables.append(Shown(heading, names))
        return part.tables[-1]
    if not set("".join(cells)) <= set("-:"):
        table.rows.append(cells)
    return table
