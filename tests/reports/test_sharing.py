"""Results for others: Parquet files, and runs of a tracker. The packages are replaced by fakes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from longseq_bench.api.results import Results
from longseq_bench.api.tracking import track
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.reports.kinds import documents, write_documents
from tests import make


def records() -> list[Record]:
    budgets = {256: None, 512: 2**20}
    return [make.record(make.trial("ring", n, memory_budget=budgets[n])) for n in budgets]


def test_parquet_has_the_rows_of_the_csv_with_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[pandas.DataFrame] = []

    def to_parquet(frame: pandas.DataFrame, index: bool) -> bytes:
        written.append(frame)
        return b"PAR1\r\n\xff"

    monkeypatch.setattr(pandas.DataFrame, "to_parquet", to_parquet)
    (path,) = write_documents(documents(records()), tmp_path, ["parquet"])
    assert path.name == "report.parquet"
    assert path.read_bytes() == b"PAR1\r\n\xff"
    (frame,) = written
    assert set(frame["tokens"]) == {256, 512}
    assert frame["memory_budget"].dtype == "Int64"
    assert frame["memory_budget"].isna().any()


def test_parquet_without_its_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="needs pyarrow: pip install pyarrow"):
        write_documents(documents(records()), tmp_path, ["parquet"])


@pytest.mark.parametrize("destination", ["trackio", "wandb:mine"])
def test_a_tracker_gets_rows_and_page(monkeypatch: pytest.MonkeyPatch, destination: str) -> None:
    calls: dict[str, Any] = {}
    fake = SimpleNamespace(
        init=lambda **given: calls.update(given),
        log=lambda values: calls.update(values),
        finish=lambda: calls.update(finished=True),
        Table=lambda dataframe: dataframe,
        Html=lambda text: text,
    )
    name, _, project = destination.partition(":")
    monkeypatch.setitem(sys.modules, name, fake)
    formats = SimpleNamespace(get=lambda name: lambda document: {document.stem: f"a page, {name}"})
    monkeypatch.setattr("longseq_bench.api.tracking.FORMATS", formats)
    found = Results(records(), Path("some/first"))
    track(found, found.documents()[0], destination)
    assert (calls["project"], calls["name"]) == (project or "longseq", "first")
    assert calls["config"]["torch"] == records()[0].environment.torch
    rows = calls["rows"]
    assert sorted(rows["tokens"]) == [256, 512]
    kinds = {type(value) for column in rows.columns for value in rows[column].to_list()}
    assert not kinds & {dict, list, tuple}, "a tracker's table holds numbers and text"
    assert calls["page"] == "a page, html"
    assert calls["finished"]
    assert "maxima" not in calls


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        ("wandd", "unknown tracker 'wandd'.*did you mean 'wandb'"),
        ("trackio", "--track trackio needs the package trackio: pip install trackio"),
    ],
)
def test_a_tracker_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, destination: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    found = Results(records())
    with pytest.raises(UserError, match=message):
        track(found, found.documents()[0], destination)
