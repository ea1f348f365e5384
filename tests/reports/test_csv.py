"""CSV: every raw sample can be read back, with its identity."""

import csv
import io
import json

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.base import FORMATS, KINDS, Source
from longseq_bench.reports.document import Cell, Column, Table
from longseq_bench.reports.render.csv import format_table
from tests import make

RECORDS = [
    make.record(
        make.trial("ring", 2048, {"chunk": 64, "w": (1, 2)}, batch=3, causal=True, round=1),
        make.outcome(time=[0.1, 0.30000000000000004], peak=5.0, facts={"backend": "x"}),
    ),
    make.record(make.trial("odd|na,me"), make.outcome("oom", 'said "no",\nthen died', "plan")),
    make.step(4096, predicted_tokens=77),
]


def rendered(records: list[Record]) -> str:
    return FORMATS.get("csv")(KINDS.get("summary")(Source(records)))["report.csv"]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("+1+1", "'+1+1"), ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+3", "'-2+3"), ("\t=1", "'\t=1"), ("\r=1", "'\n=1"), ("a\x1b[31m\x07b\x00", "ab"),
        ("a\rb", "a\nb"), (-1.5, "-1.5"), ("0.1 0.2", "0.1 0.2"),
    ],
)  # fmt: skip
def test_free_text_is_no_formula_and_numbers_stay(text: Cell, cell: str) -> None:
    table = Table("", (Column("=x()"), Column("y")), ((text, 1),))
    heading, row = csv.reader(io.StringIO(format_table(table), newline=""))
    assert heading == ["'=x()", "y"]
    assert row == [cell, "1"]


def test_every_sample_comes_back() -> None:
    found: dict[tuple[str, str], tuple[float, ...]] = {}
    for row in csv.DictReader(io.StringIO(rendered(RECORDS))):
        if row["measurement"]:
            values = tuple(map(float, row["values"].split()))
            found[row["key"], row["measurement"]] = values
            assert int(row["samples"]) == len(values)
            assert (float(row["smallest"]), float(row["largest"])) == (min(values), max(values))
    assert found == {
        (record.key, measurement.name): measurement.samples
        for record in RECORDS
        for measurement in record.outcome.measurements
    }


def test_the_identity_of_a_record_comes_back() -> None:
    rows = list(csv.DictReader(io.StringIO(rendered(RECORDS))))
    first, failed = rows[0], next(row for row in rows if row["status"] == "oom")
    assert json.loads(first["options"]) == {"chunk": 64, "w": [1, 2]}
    assert (first["tokens"], first["batch"], first["round"]) == ("2048", "3", "1")
    assert (first["causal"], first["purpose"], first["unit"]) == ("True", "measure", "s")
    assert first["fingerprint"] == RECORDS[0].environment.fingerprint
    assert (failed["implementation"], failed["phase"]) == ("odd|na,me", "plan")
    assert failed["reason"] == 'said "no",\nthen died'
    assert (failed["measurement"], failed["memory_budget"]) == ("", "")
    assert rows[-1]["predicted_tokens"] == "77"
