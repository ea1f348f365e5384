"""A page of Markdown against the records it is about: where it is not what they say.

oracle.py has the figures, tables.py and grids.py what each table must hold, sentences.py what each
sentence must say. What has no rule in one of them is a fault too: a new column, section, sentence.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from tests.reports import sentences
from tests.reports.grids import GRIDS, commands, hangs
from tests.reports.oracle import Book
from tests.reports.pages import Part, Shown
from tests.reports.tables import CELLS, EXPECTED, Expected, columns

OWN = {
    "extreme": "Recommendations; Longest lengths; Lengths swept; Sparsity against length; "
    "Time a doubling; Memory against standard attention; Use case, approach, maximum; "
    "On other hardware, computed",
    "devices": "Recommendations; Batch, length, time and memory; Ranks; Memory by sparsity; "
    "Single against many",
    "scaling": "Recommendations; Segments and dilation; Along the curve and along the sequence; "
    "Many ranks; Longest lengths over ranks; How time and memory grow; Bottlenecks",
    "capabilities": "Modes run here; What works on many ranks; Speed-up and efficiency by length; "
    "Where it begins to pay",
    "implementations": "Time, memory, relative speed; How time and memory grow; "
    "What works on many ranks; Recommendations",
    "summary": "Summary; Longest lengths; Lengths swept; Sparse attention; Least sparsities; "
    "Longest lengths over ranks; How time and memory grow; Ranks",
}
"""Sections that each kind must have where there is anything to tell in them."""
ENDING = "Failures; Hardware and versions; How each ran; How to reproduce"
RECOMMENDED = ("Recommendations", "Where it begins to pay")


def faults(kind: str, book: Book, parts: Sequence[Part]) -> Iterator[str]:
    """Of a whole page: its parts, and what is missing."""
    for part in parts:
        yield from of_part(kind, book, part)
    titles = {part.title for part in parts}
    for title in {*OWN[kind].split("; "), *ENDING.split("; "), *hangs(book)} - titles:
        yield from (f"{title!r} is missing" for _ in told(title, kind, book))


def of_part(kind: str, book: Book, part: Part) -> Iterator[str]:
    """Of one section, or of the head, which has no title."""
    if not part.title:
        yield from unlike("head", sentences.heads(book), part.paragraphs[1:])
        return
    if part.title in (hung := hangs(book)):
        said, code = hung[part.title]
        yield from unlike(part.title, said, part.paragraphs)
        yield from unlike(part.title, code, part.code)
        return
    if part.title not in f"{OWN[kind]}; {ENDING}".split("; "):
        yield f"no oracle for section {part.title!r} of {kind}"
        return
    yield from of_tables(book, part)
    yield from of_words(kind, book, part)


def told(title: str, kind: str, book: Book) -> Iterator[Any]:
    """The first thing that a section should tell."""
    rules = [EXPECTED.get(title), GRIDS.get(title), sentences.POINTS.get(title)]
    rules += sentences.recommended(kind) if title in RECOMMENDED else []
    yield from islice((one for rule in rules if rule for one in rule(book)), 1)
    yield from islice(hangs(book).get(title, ()), 1)


def of_tables(book: Book, part: Part) -> Iterator[str]:
    """Of a section's tables."""
    if part.title in GRIDS:
        shown = [(t.title, t.columns, t.rows) for t in part.tables]
        yield from unlike(part.title, flat(GRIDS[part.title](book)), flat(shown))
        return
    rule = EXPECTED.get(part.title)
    wanted = list(rule(book)) if rule else []
    titles, expected = [t.title for t in part.tables], [e.title for e in wanted]
    if titles != expected:
        yield f"{part.title}: tables {titles}, not {expected}"
        return
    for table, one in zip(part.tables, wanted, strict=True):
        yield from of_table(f"{part.title}, {table.title}", table, one)


def of_table(where: str, table: Shown, expected: Expected) -> Iterator[str]:
    """Of a table: its columns, then every cell of every row."""
    cells = CELLS[expected.kind]
    for name in table.columns:
        if name not in cells:
            yield f"no oracle for column {name!r} of section {where}"
            return
    if set(table.columns) != set(columns(expected)):
        yield f"{where}: columns {table.columns}, not {columns(expected)}"
        return
    rows = [[" ".join(cells[name](row).split()) for name in table.columns] for row in expected.rows]
    yield from unlike(where, flat([("", [], rows)]), flat([("", [], table.rows)]))


def flat(tables: Iterable[tuple[str, list[str], list[list[str]]]]) -> list[str]:
    """Rows of tables as lines, each with its table's title and headings."""
    return [" | ".join([title, *names, *row]) for title, names, rows in tables for row in rows]


def of_words(kind: str, book: Book, part: Part) -> Iterator[str]:
    """Of a section's points, pictures, paragraphs and commands."""
    rules = sentences.recommended(kind) if part.title in RECOMMENDED else []
    rules += [rule] if (rule := sentences.POINTS.get(part.title)) else []
    said = [" ".join(sentence.split()) for rule in rules for sentence in rule(book)]
    yield from unlike(part.title, said, part.points)
    rule = sentences.PICTURES.get(part.title) if part.tables else None
    yield from unlike(part.title, list(rule(book)) if rule else [], part.pictures)
    known = {*sentences.FIXED, *sentences.paragraphs(book)}
    for paragraph in part.paragraphs:
        paragraph = signs(book, paragraph)
        if re.search(r"\d", paragraph) and paragraph not in known:
            yield f"{part.title}: no oracle for the paragraph {paragraph!r}"
    if part.title == "How to reproduce":
        yield from unlike(part.title, commands(book), part.code)
    elif not sentences.COMMANDS.issuperset(part.code):
        yield f"{part.title}: no oracle for the commands {part.code}"


def signs(book: Book, paragraph: str) -> str:
    """Without what a picture rightly says it has no room for, beyond 32 series of those known."""
    cut = re.search(r" ?Not drawn for want of room: (\d+) of (\d+) series\.", paragraph)
    if cut is None:
        return paragraph
    left, series = map(int, cut.groups())
    several = [r for r in book.swept if r.ranks > 1]
    there = len({r.name for r in book.swept}) + sum(r.ranks for r in several)
    right = left == series - 32 and series <= max(there, len(book.searches))
    return paragraph.replace(cut[0], "") if right else paragraph


def unlike(where: str, wanted: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    """Lines that are found and not wanted, beside the nearest; and wanted ones that are missing."""
    wanted, found = Counter(wanted), Counter(found)
    missing = list((wanted - found).elements())
    for line in (found - wanted).elements():
        near = difflib.get_close_matches(line, missing, 1, 0.3)
        for one in near:
            missing.remove(one)
        yield f"{where}: {line!r}" + (f", not {near[0]!r}" if near else " has no ground")
    yield from (f"{where}: {line!r} is missing" for line in missing)
