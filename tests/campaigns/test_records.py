"""A short form of the campaign of hostile records."""

from pathlib import Path
from typing import Any

import pytest

from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.cli import run
from longseq_bench.reports import section_charts
from tests import make
from tests.campaigns.records import find_failures


def test_hostile_records_are_broken_lines_and_no_traceback() -> None:
    assert list(find_failures(2, seed=7, formats="csv,json")) == []


@pytest.mark.parametrize(
    ("name", "value"), [("stacks", {"0": 5}), ("every_row_checked", 7), ("dense", [1])]
)
def test_facts_of_any_type_are_reported(
    tmp_path: Path, name: str, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = {"time": [0.1] * 9, "dense_time": [0.3] * 9, "checked_rows": 8.0}
    came_to = make.outcome("hang" if name == "stacks" else "ok", facts={name: value}, **samples)
    folder = make.write_records(tmp_path, [make.record(make.trial(world_size=1), came_to)])
    assert run(["report", str(folder), "--format", "csv,json", "--kind", "all"]) == 0
    assert "wrote" in capfd.readouterr().err


def test_a_sparsity_that_is_a_word_has_no_chart() -> None:
    rows = [
        make.record(
            make.trial("block-sparse", options={"sparsity": sparsity}),
            make.outcome(time=[0.1] * 9, dense_time=[0.3] * 9, density_achieved=0.1),
        )
        for sparsity in ("auto", "much")
    ]
    assert section_charts.speed_over_dense(sweep_rows(rows), "") is None
