"""Documents that commands print when they end: rows, failures, answers, explanations."""

from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.brief import scaling_brief, search_brief, sweep_brief
from longseq_bench.reports.document import Document, Spread
from tests import make
from tests.reports.examples import failed
from tests.reports.reading import cells

MIB = 2**20
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:117] can't allocate memory: you tried to allocate 9 B"


def run(name: str, ranks: int = 1, time: float = 0.1, **fields: Any) -> Record:
    """Six passes on each rank."""
    times = [time * (1 + i / 1000) for i in range(6)]
    each = {"time": times, "peak": 8 * MIB, "max_error": 1e-6, "flops": 1e9}
    trial = make.trial(name, world_size=ranks, **fields)
    return make.record(trial, make.on_ranks(*[each] * ranks))


def rows_of(document: Document) -> list[dict[str, Any]]:
    return cells(next(table for section in document.sections for table in section.tables))


def points_of(document: Document) -> list[str]:
    return [point for section in document.sections for point in section.points]


def test_rows_on_one_rank_have_no_columns_of_ranks() -> None:
    found = sweep_brief([run("sdpa"), run("ring", time=0.2)], "sdpa")
    sdpa, ring = rows_of(found)
    assert list(sdpa) == [
        "Implementation", "Tokens", "Time", "Peak memory", "× sdpa", "Effective FLOP/s",
        "Max error",
    ]  # fmt: skip
    assert (ring["Implementation"], ring["Tokens"], ring["Peak memory"]) == ("ring", 4096, 8 * MIB)
    assert isinstance(ring["Time"], Spread)
    assert ring["Time"].value == pytest.approx(0.2005, rel=1e-3)
    assert ring["× sdpa"] == pytest.approx(0.5)
    assert points_of(found) == []


def test_failures_are_grouped_and_short() -> None:
    found = sweep_brief([
        run("sdpa"),
        *(failed("oom", "dense", n, ALLOCATOR, phase="forward") for n in (1024, 2048)),
        failed("unsupported", "usp", 4096, "runs on two ranks", phase="forward"),
    ])  # fmt: skip
    assert [row["Time"] for row in rows_of(found)[1:]] == ["out of memory"] * 2 + ["unsupported"]
    assert points_of(found) == [
        "dense at 1k and 1 more: out of memory in forward",
        "usp at 4k: unsupported: runs on two ranks",
    ]


def sparse(name: str, source: str) -> Record:
    outcome = make.outcome(
        time=[0.1] * 6, dense_time=[0.8] * 6, flops=0.05 * 1e12, dense_flops=1e12,
        density_achieved=0.3, facts={"dense": source},
    )  # fmt: skip
    return make.record(make.trial(name), outcome)


def test_a_share_of_ideal_has_the_source_of_its_dense_time() -> None:
    found = sweep_brief([run("sdpa"), sparse("dilated", "measured"),
                         sparse("hilbert", "computed from 1,024 of 4,096 rows")])  # fmt: skip
    exact, *others = rows_of(found)
    assert exact["Share of ideal"] is None
    assert [row["Share of ideal"] for row in others] == [pytest.approx(0.4)] * 2
    assert [row["Source of dense time"] for row in others] == [
        "measured", "computed from 1,024 of 4,096 rows",
    ]  # fmt: skip


def test_a_search_answers_in_a_row_and_a_sentence() -> None:
    found = search_brief([make.step(1024), make.step(2048, "oom")])
    (row,) = rows_of(found)
    assert (row["Max tokens"], row["First failure"], row["Limited by"]) == (1024, 2048, "memory")
    assert "Ranks" not in row
    answer = points_of(found)[-1]
    assert answer.startswith("sdpa takes 1k tokens, ")
    assert answer.endswith("limited by memory in forward at 2k.")


def test_scaling_adds_theory_and_exponents_to_the_rows() -> None:
    swept = [run("ring", n, 1e-9 * s * s / n, seq_len=s) for s in (256, 512, 1024) for n in (1, 2)]
    tables = [t for section in scaling_brief(swept).sections for t in section.tables]
    assert tables[0].columns[1].name == "Tokens"
    fit = cells(tables[-1])[0]
    assert fit["Tokens ^"] == "2.00 (2.00 to 2.00)"
    assert fit["Ranks ^"] == "-1.00 (-1.00 to -1.00)"
