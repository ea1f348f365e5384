"""Parquet files. The package that writes them is replaced by a fake."""

import sys
from pathlib import Path

import pandas
import pytest

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
