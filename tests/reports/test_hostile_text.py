"""Names and reasons with control characters: none reaches a file."""

from pathlib import Path

from longseq_bench.reports.base import FORMATS
from longseq_bench.reports.document import Column, Document, Section, Table
from longseq_bench.reports.kinds import documents, write_documents
from longseq_bench.reports.render.html import page
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


def test_control_characters_do_not_break_a_chart() -> None:
    """vl-convert ends the whole process on some of them."""
    records = [make.record(make.trial("a\x00b\x1b[31m\u202e", n)) for n in (1024, 2048)]
    files = FORMATS.get("md")(documents(records)[0])
    assert len(files) > 1
    assert "\x1b" not in "".join(text for name, text in files.items() if name[-3:] == "svg")
