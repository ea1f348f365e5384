"""Unstable rows: load by others, CPU time short of the time, drift; and where they are shown."""

from collections.abc import Sequence

import pytest

from longseq_bench.analysis.runs import REMEDY
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.core.model import Record
from longseq_bench.reports.brief import sweep_brief
from longseq_bench.reports.kinds import documents
from tests import make
from tests.reports.reading import cells

STEADY = [0.1 + i / 1e5 for i in (3, 1, 2, 0, 4, 5)]


def run(
    times: Sequence[float] = STEADY, load: float = 1.0, cpu: float = 1.9, round: int = 0,
    facts: dict[str, str] | None = None, **fields: object,
) -> Record:  # fmt: skip
    """A round on two cores. cpu: processor time of a pass over its time."""
    trial = make.trial("sdpa", round=round, **fields)
    ranks = trial.world_size
    each = {"time": times, "cpu_time": [cpu * t for t in times], "peak": 2**20}
    where = make.environment(load=(load, load, load))
    started_at = f"2026-11-21T09:{round:02d}:00Z"
    return make.record(
        trial, make.on_ranks(*[each] * ranks, facts=facts), where, started_at=started_at
    )


def verdict(*records: Record) -> str | None:
    (row,) = sweep_rows(records)
    return row.unstable


@pytest.mark.parametrize(
    ("load", "fields", "reason"),
    [
        (4.0, {}, None),
        (4.1, {}, "load 4.1 on 2 cores"),
        # the trial's own ranks and threads are no load by others
        (16.0, {"world_size": 4, "threads": 2}, None),
        (16.1, {"world_size": 4, "threads": 2}, "load 16.1 on 2 cores"),
        (30.0, {"device": "cuda"}, None),
    ],
)
def test_load_by_other_work(load: float, fields: dict[str, object], reason: str | None) -> None:
    assert verdict(run(load=load, **fields)) == reason


@pytest.mark.parametrize(
    ("cpu", "fields", "reason"),
    [
        (0.95, {}, None),
        (0.6, {}, "CPU time is 60% of the time"),
        # ranks wait for each other, a GPU for nobody, an own function perhaps on purpose
        (0.6, {"world_size": 2}, None),
        (0.6, {"device": "cuda"}, None),
        (0.6, {"source": "0123"}, None),
    ],
)
def test_cpu_time_short_of_the_time(
    cpu: float, fields: dict[str, object], reason: str | None
) -> None:
    assert verdict(run(cpu=cpu, **fields)) == reason


def test_drift_over_rounds_and_over_samples() -> None:
    assert verdict(run(), run(round=1), run(round=2)) is None
    slower = [1.2 * t for t in STEADY]
    assert verdict(run(STEADY), run(slower, round=1)) == "drift +20%"
    # in the order of the rounds, not of the file
    assert verdict(run(STEADY, round=1), run(slower)) == "drift -17%"
    assert verdict(run([*STEADY, *slower])) == "drift +20%"
    # below a tenth, within the spread, or too few passes
    assert verdict(run(STEADY), run([1.05 * t for t in STEADY], round=1)) is None
    assert verdict(run([*STEADY, *slower], round=0), run([*slower, *STEADY], round=1)) is None
    assert verdict(run(STEADY[:5]), run(slower[:5], round=1)) is None


def test_a_throttled_gpu() -> None:
    hot = {"throttled": "2 of 4 passes throttled (heat)"}
    rounds = [run(facts=hot, device="cuda"), run(round=1, device="cuda")]
    assert verdict(*rounds, run(round=2, facts=hot, device="cuda")) == hot["throttled"]


def test_a_failed_row_has_no_verdict() -> None:
    failed = make.record(make.trial(), make.outcome("oom"), make.environment(load=(99, 99, 99)))
    assert verdict(failed) is None


def test_terminal_markdown_csv_and_page_name_reason_and_remedy() -> None:
    records = [run(load=9.0), run(load=1.0, seq_len=8192)]
    brief = sweep_brief(records)
    rows = cells(brief.sections[0].tables[0])
    assert [row["Unstable"] for row in rows] == ["unstable", None]
    sentence = f"sdpa at 4k: unstable, load 9.0 on 2 cores; {REMEDY}."
    points = [point for section in brief.sections for point in section.points]
    assert [point for point in points if point.startswith(sentence)]
    (report,) = documents(records)
    warning = f"unstable: load 9.0 on 2 cores; {REMEDY}"
    found = [
        cell for section in report.sections for t in section.tables for r in t.rows for cell in r
    ]
    assert warning in found
    points = [point for section in report.sections for point in section.points]
    assert any(p.startswith("Unstable times, run these again on an idle mach") for p in points)
    names = [column.name for column in report.data.columns]
    raw = {(row[names.index("tokens")], row[names.index("unstable")]) for row in report.data.rows}
    assert {(4096, "load 9.0 on 2 cores"), (8192, None)} == raw
