"""Names and reasons with control characters: none reaches a file."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from longseq_bench.reports import documents, write_documents
from longseq_bench.reports.document import Column, Document, Section, Table
from longseq_bench.reports.render.html import page
from longseq_bench.reports.render.terminal import print_document
from tests import make

HOSTILE = "a\rb\x1b[31mc\x00d\x07e\x08f\x9b\u202e\u2066\u200fg"
CONTROL = {chr(code) for code in (*range(9), 11, 12, 13, *range(14, 32), *range(127, 160))}
CONTROL |= set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def test_no_control_character_reaches_a_file(tmp_path: Path) -> None:
    records = [
        make.record(make.trial(f"ring{HOSTILE}"), where=make.environment(f"host{HOSTILE}")),
        make.record(
            make.trial("sdpa"), make.outcome("error", HOSTILE, "forward"), command=f"x {HOSTILE}",
            where=make.environment(f"host{HOSTILE}"),
        ),
    ]  # fmt: skip
    built = documents(records, configs={"sweep.yaml": f"tokens: 1k\n# {HOSTILE}\n"})
    write_documents([built[0].without_charts()], tmp_path, ["md", "csv", "json"])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".md", ".csv", ".json"}
    for path in files:
        text = path.read_bytes().decode()
        assert "cdefg" in text or path.suffix == ".json" or path.parent != tmp_path
        assert not CONTROL & set(text), path


def test_no_control_character_reaches_a_page() -> None:
    table = Table(HOSTILE, (Column(HOSTILE),), ((HOSTILE,),))
    section = Section(HOSTILE, [HOSTILE], [HOSTILE], tables=[table], code=[HOSTILE])
    text = page(Document("summary", HOSTILE, [HOSTILE], [section]))
    assert "cdefg" in text
    assert not CONTROL & set(text)


@pytest.mark.parametrize("line", ["a\rb", "a\r\nb"])
def test_a_config_keeps_its_lines(line: str, tmp_path: Path) -> None:
    code = Document("summary", "t", [], [Section("s", code=[line])])
    (path,) = write_documents([code], tmp_path, ["md"])
    assert path.read_bytes().decode().split("```")[1] == "\na\nb\n"


def test_a_name_of_control_characters_alone_is_an_empty_cell() -> None:
    nothing = "\x1b[31m"
    table = Table("t", (Column("a"), Column(nothing)), (("b", nothing),))
    screen = Console(width=80, record=True, file=io.StringIO())
    print_document(Document("summary", "t", [], [Section("s", tables=[table])]), screen)
    assert screen.export_text().split()[-2:] == ["a", "b"]
