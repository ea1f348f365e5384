"""Every kind in every format, whatever the records; and the files that are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.errors import StoreError, UnknownNameError
from longseq_bench.model import Record
from longseq_bench.reports import write_report
from longseq_bench.reports.base import FORMATS, KINDS, Source
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
        ),
    ],
    "machines": [make.record(), make.record(where=make.environment("beta"))],
}


@pytest.mark.parametrize("kind", KINDS.names())
@pytest.mark.parametrize("name", SETS)
def test_a_kind_tells_every_record_or_counts_it(kind: str, name: str) -> None:
    document = KINDS.get(kind)(Source(SETS[name]))
    keys = {cell for row in document.data.rows for cell in row}
    assert {record.key for record in SETS[name]} <= keys
    assert document.title
    assert all(s.points or s.tables or s.code for s in document.sections)


@pytest.mark.parametrize("format_name", FORMATS.names())
@pytest.mark.parametrize("name", SETS)
def test_a_format_writes_every_kind_the_same_way_twice(format_name: str, name: str) -> None:
    for kind in KINDS.names():
        first, second = (
            FORMATS.get(format_name)(KINDS.get(kind)(Source(SETS[name]))) for _ in range(2)
        )
        assert first == second
        assert first.endswith("\n")
        assert "nan" not in first


def test_the_files_are_named_for_their_format(tmp_path: Path) -> None:
    written = write_report(SETS["mixed"], tmp_path / "new" / "folder", notes=["Said so."])
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "new/folder/report.md", "new/folder/report.csv",
    ]  # fmt: skip
    assert "Said so." in written[0].read_text()
    assert written[1].read_text().count("\n") >= 3
    (only,) = write_report(SETS["mixed"], tmp_path, formats=["csv"])
    assert only.read_text() == written[1].read_text()


def test_mistakes_are_named_before_anything_is_written(tmp_path: Path) -> None:
    records, folder = SETS["one row"], tmp_path / "out"
    with pytest.raises(UnknownNameError, match=r"report format 'cvs'; did you mean 'csv'"):
        write_report(records, folder, formats=["md", "cvs"])
    with pytest.raises(UnknownNameError, match=r"report kind 'sumary'; did you mean 'summary'"):
        write_report(records, folder, kind="sumary")
    with pytest.raises(UnknownNameError, match=r"baseline 'sdap' in the results; did you mean"):
        write_report(records, folder, baseline="sdap")
    with pytest.raises(StoreError, match="no record to report on"):
        write_report([], folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"report folder {tmp_path}/file can't be written"):
        write_report(SETS["one row"], tmp_path / "file")


def test_reports_need_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from longseq_bench.reports.base import KINDS, FORMATS; KINDS.names();"
        "FORMATS.names(); print({'torch', 'pandas'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"
