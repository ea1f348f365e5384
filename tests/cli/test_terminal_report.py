"""`longseq report --format terminal`: all that a document says, within the width, as plain text."""

from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from longseq_bench.cli import run
from longseq_bench.core.model import Record
from longseq_bench.reports.base import KINDS
from longseq_bench.reports.document import (
    Axis,
    Cell,
    Chart,
    Column,
    Document,
    Mark,
    Point,
    Section,
    Spread,
    Table,
)
from longseq_bench.reports.kinds import documents
from longseq_bench.reports.render.terminal import print_document
from longseq_bench.store import RECORDS, load
from tests import make
from tests.cli.commands import Capture

RESULTS = Path(__file__).parents[2] / "results" / "xeon2"
WIDTHS = (60, 120)


def printed(document: Document, width: int) -> list[str]:
    screen = Console(file=StringIO(), width=width, color_system=None, highlight=False)
    print_document(document, screen)
    text = str(screen.file.getvalue())  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


@cache
def records(name: str) -> tuple[Record, ...]:
    return tuple(load(RESULTS / name).records)


@cache
def real(name: str, kind: str) -> Document:
    return documents(records(name), [kind])[0]


def squeezed(text: str) -> str:
    return "".join(text.split())


BEFORE = 5
"""Lines of the headings that `of` puts before."""


def of(*tables: Table) -> Document:
    return Document("one", "Title", [], [Section("Section", tables=tables)])


# ---- everything is there -----------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS.names())
def test_the_page_of_every_kind_is_printed_and_counts_the_details(kind: str, width: int) -> None:
    whole = real("ranks" if kind in ("devices", "scaling") else "quickstart", kind)
    count = sum(section.is_detail for section in whole.sections)
    assert printed(whole, width)[-1] == f"{count} sections of details: --format md or html."
    document = whole.in_one_file()
    told = printed(document, width)
    code = {line for section in document.sections for line in section.code}
    assert code <= set(told)
    assert max(cell_len(line) for line in told if line not in code) <= width
    assert not any("…" in line for line in told)
    assert len(printed(whole, width)) < 80 < len(told)
    said, at = squeezed("\n".join(told)), 0
    for section in document.sections:
        title = [i for i, line in enumerate(told) if line == section.title]
        assert [i for i in title if i >= at], section.title
        at = next(i for i in title if i >= at)
        for sentence in (*section.paragraphs, *(f"• {p}" for p in section.points)):
            assert squeezed(sentence) in said
        for table in section.tables:
            assert "\n".join(printed(of(table), width)[BEFORE:]) in "\n".join(told[at:])


def test_points_are_indented_and_lines_are_readable() -> None:
    words = " ".join(f"word{i}" for i in range(40))
    document = Document("one", "Title", [words], [Section("Section", [], [words, words])])
    for width in (40, 400):
        told = printed(document, width)
        points = told[told.index("Section") + 2 :]
        assert {line[:2] for line in points} == {"• ", "  "}
        assert [line[:2] for line in points].count("• ") == 2
        assert min(width, 100) - 7 <= max(map(len, told)) <= min(width, 100)


# ---- tables ------------------------------------------------------------------------------------

WIDE = Table(
    "Wide",
    (Column("Name"), Column("Same", "count"), Column("Empty", "bytes"), Column("Tokens", "tokens"),
     Column("Median time", "seconds"), Column("Tokens/s", "count"), Column("Reason")),
    tuple(
        (f"name {i}", 7, None, 1024 * i, Spread(0.0123 * i, 0.012 * i, 0.0126 * i), 123456 * i,
         f"sentence {i} is long enough to take more than one line of a narrow terminal")
        for i in (2, 3, 4, 5)
    ),
)  # fmt: skip


def gone(told: list[str]) -> list[str]:
    said = " ".join(" ".join(told).split()).partition("no room for ")[2].partition(":")[0]
    return [word for word in said.split(", ") if word]


def test_less_important_columns_are_hidden_first() -> None:
    order: list[str] = []
    for width in range(200, 15, -3):
        told = printed(of(WIDE), width)
        assert "Empty" not in " ".join(told)
        order += [name for name in gone(told) if name not in order]
    # of three or more, two are named
    more = ["1 more column", "2 more columns"]
    assert order == ["Reason", "Tokens/s", "Median time", more[0], "Tokens", more[1]]


@pytest.mark.parametrize("width", [70, 91, 133])
def test_long_words_wrap_and_figures_do_not(width: int) -> None:
    told = printed(of(WIDE), width)
    (row,) = [line for line in told if line.startswith("name 2")]
    assert "24.6 ms ±2.4 %" in row
    assert "2k" in row.split()
    if "Reason" not in gone(told):
        start = row.index("sentence")
        lines = [line[start:] for line in told[told.index(row) :] if not line.startswith("no room")]
        assert " ".join(" ".join(lines).split()).startswith(str(WIDE.rows[0][-1]))


def test_a_wide_table_of_few_rows_is_turned_and_loses_nothing() -> None:
    fields = ["Name", "Same", "Tokens", "Median time", "Tokens/s", "Reason"]
    told = printed(of(replace(WIDE, rows=WIDE.rows[:2])), 45)[BEFORE:]
    lines = [line for line in told if not line.startswith(" ")]
    assert [line.split("  ")[0] for line in lines] == ["Wide", *fields]
    assert " ".join(lines[4].split()) == "Median time 24.6 ms ±2.4 % 36.9 ms ±2.4 %"


def test_a_long_table_is_cut_and_says_so() -> None:
    table = Table("", (Column("Name"),), tuple((f"row {i}",) for i in range(500)))
    told = printed(of(table), 80)
    assert "row 199" in told
    assert "row 200" not in told
    assert any(line.startswith("the first 200 of 500 rows") for line in told)


# ---- hostile text ------------------------------------------------------------------------------

HOSTILE = "[red]a[/blue]\n\x1b[2J\x1b]0;t\x07|<b>:smile:\x9b2J\u202e\\"
SHOWN = "[red]a[/blue] ]0;t|<b>:smile:2J\\"


def hostile() -> Document:
    cells: tuple[Cell, ...] = (HOSTILE, HOSTILE, 5)
    table = Table(HOSTILE, (Column(HOSTILE), Column(HOSTILE), Column(HOSTILE, "count")), (cells,))
    tokens, seconds = Axis(HOSTILE, "tokens"), Axis(HOSTILE, "seconds")
    points, failed = (Point(HOSTILE, 1, 1.0),), (Mark(HOSTILE, 3, HOSTILE),)
    charts = [Chart(HOSTILE, HOSTILE, HOSTILE, tokens, seconds, points, failed)]
    section = Section(HOSTILE, [HOSTILE], [HOSTILE], [table], [HOSTILE], charts)
    return Document("one", HOSTILE, [HOSTILE], [section])


def test_hostile_text_is_text() -> None:
    told = "\n".join(printed(hostile(), 300))
    assert not {c for c in told if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"} - {"\n"}
    assert squeezed(told).count(squeezed(SHOWN)) > 10


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make.write_records(tmp_path, [make.record()])


def test_terminal_prints_and_writes_nothing(folder: Path, capfd: Capture) -> None:
    assert run(["report", str(folder), "--format", "terminal"]) == 0
    said = capfd.readouterr()
    (document,) = documents(load(folder).records)
    assert [line.rstrip() for line in said.out.splitlines()] == printed(document, 80)
    assert said.err == ""
    assert [path.name for path in folder.iterdir()] == [RECORDS]


def test_terminal_and_files(folder: Path, capfd: Capture) -> None:
    assert run(["report", str(folder), "--format", "md,terminal"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("How many tokens attention takes here\n═")
    assert said.err.splitlines() == [f"wrote {folder / 'report.md'}"]
    assert (folder / "report.md").exists()
