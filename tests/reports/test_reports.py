"""Every kind in every format for any records, and the written files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.base import FORMATS, KINDS, Source
from longseq_bench.reports.kinds import documents, write_documents
from tests import make

SETS: dict[str, list[Record]] = {
    "one row": [make.record()],
    "one failure": [make.record(came_to=make.outcome("crashed", None))],
    "one step": [make.step(1024)],
    "failed steps": [make.step(1024, "hang"), make.step(512, "unsupported", phase=None)],
    "mixed": [make.record(make.trial("a|b", options={"x": "<i>"})), make.step(1, "oom")],
    "ranks": [
        make.record(make.trial(world_size=n), make.measured(ranks=n, compute_time=0.05))
        for n in (1, 2, 4)
    ],
    "a hang": [
        make.record(
            make.trial("a|b", world_size=2),
            make.outcome("hang", "rank 1", facts={"stacks": {"0": ["```", "<i>"], "1": []}}),
        )
    ],
    "machines": [make.record(), make.record(where=make.environment("beta"))],
}


@pytest.mark.parametrize("kind", KINDS.names())
@pytest.mark.parametrize("name", SETS)
def test_a_kind_reports_or_counts_every_record(kind: str, name: str) -> None:
    document = KINDS.get(kind)(Source(SETS[name]))
    keys = {cell for row in document.data.rows for cell in row}
    assert {record.key for record in SETS[name]} <= keys
    assert document.title
    assert all(s.points or s.tables or s.code for s in document.sections)


@pytest.mark.parametrize("format_name", [n for n in FORMATS.names() if n != "parquet"])
def test_a_format_is_deterministic(format_name: str) -> None:
    records = [*SETS["mixed"], *SETS["ranks"], *SETS["a hang"]]
    for kind in ("summary", "scaling"):
        first, second = (
            FORMATS.get(format_name)(KINDS.get(kind)(Source(records))) for _ in range(2)
        )
        assert first == second
        stem = "report" if kind == "summary" else kind
        assert next(iter(first)) == f"{stem}.{format_name}"
        assert all(text for text in first.values())
        assert not any(re.search(r"\bnan\b", t) for n, t in first.items() if n[-4:] != "html")


def write(
    records: list[Record], folder: Path, formats: Sequence[str] = ("md", "csv"), **given: Any
) -> list[Path]:
    return write_documents(documents(records, **given), folder, formats)


def test_the_files_are_named_for_their_format(tmp_path: Path) -> None:
    written = write(SETS["mixed"], tmp_path / "new" / "folder", notes=["Said so."])
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "new/folder/report.md", "new/folder/report.csv",
    ]  # fmt: skip
    assert "Said so." in written[0].read_text()
    assert written[1].read_text().count("\n") >= 3
    (only,) = write(SETS["mixed"], tmp_path, formats=["csv"])
    assert only.read_text() == written[1].read_text()


def test_facts_of_any_type_are_reported() -> None:
    samples = {"time": [0.1] * 9, "dense_time": [0.3] * 9, "checked_rows": 8.0}
    came_to = make.outcome(facts={"every_row_checked": 7, "dense": [1]}, **samples)
    assert documents([make.record(came_to=came_to)], ["all"])
