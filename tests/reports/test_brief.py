"""Documents that commands print at their end: rows, failures, answers, explanations."""

from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.reports.brief import density_brief, scaling_brief, search_brief, sweep_brief
from longseq_bench.reports.document import Cell, Document, Spread
from tests import make

MIB = 2**20
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:117] can't allocate memory: you tried to allocate 9 B"


def run(name: str, ranks: int = 1, time: float = 0.1, **fields: Any) -> Record:
    """Six passes on each rank; the compute time is nine tenths of the time."""
    each = [
        {"time": [time * (1 + i / 1000) for i in range(6)], "peak": (8 - rank) * MIB,
         "max_error": 1e-6, "own_tokens": 4096 // ranks, "bytes_sent": 3 * MIB, "flops": 1e9}
        | ({"compute_time": time * 0.9} if ranks > 1 else {})
        for rank in range(ranks)
    ]  # fmt: skip
    trial = make.trial(name, world_size=ranks, memory_budget=64 * MIB, **fields)
    return make.record(trial, make.on_ranks(*each))


def failed(name: str, status: Any, reason: str, **fields: Any) -> Record:
    trial = make.trial(name, memory_budget=64 * MIB, **fields)
    return make.record(trial, make.outcome(status, reason, "forward"))


def rows_of(document: Document, table: int = 0) -> list[dict[str, Cell]]:
    found = [t for section in document.sections for t in section.tables][table]
    names = [column.name for column in found.columns]
    return [dict(zip(names, row, strict=True)) for row in found.rows]


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


def test_rows_on_several_ranks_say_how_they_scale() -> None:
    one, two = rows_of(sweep_brief([run("ring", 1, 0.1), run("ring", 2, 0.0625)]))
    assert (one["Ranks"], two["Ranks"], two["Tokens a rank"]) == (1, 2, 2048)
    assert two["Speed-up"] == pytest.approx(1.6)
    assert two["Efficiency"] == pytest.approx(0.8)
    assert two["Exposed"] == pytest.approx(0.1, rel=0.1)
    assert (two["Sent a rank"], two["Imbalance"]) == (3 * MIB, pytest.approx(8 / 7))


def test_columns_are_in_the_order_of_their_importance() -> None:
    (table, *_) = sweep_brief([run("ring", 1), run("ring", 2)], "ring").sections[0].tables
    priorities = [column.priority or 0 for column in table.columns[1:]]
    assert priorities == sorted(priorities, reverse=True)
    assert [column.name for column in table.columns[1:4]] == ["Tokens", "Ranks", "Time"]


def test_workloads_have_tables_of_their_own_and_state_it_once() -> None:
    found = sweep_brief([run("sdpa"), run("sdpa", causal=True)])
    titles = [table.title for section in found.sections for table in section.tables]
    assert [", causal," in title for title in titles] == [False, True]


def test_failures_are_grouped_and_short() -> None:
    found = sweep_brief([
        run("sdpa"),
        *(failed("dense", "oom", ALLOCATOR, seq_len=n) for n in (1024, 2048)),
        failed("usp", "unsupported", "runs on two ranks"),
    ])  # fmt: skip
    assert [row["Time"] for row in rows_of(found)[1:]] == ["out of memory"] * 2 + ["unsupported"]
    assert points_of(found) == [
        "dense at 1k and 1 more: out of memory in forward",
        "usp at 4k: unsupported: runs on two ranks",
    ]


def sparse(name: str, source: str) -> Record:
    trial = make.trial(name, memory_budget=64 * MIB)
    came_to = make.outcome(
        time=[0.1] * 6, dense_time=[0.8] * 6, peak=3 * MIB, max_error=1e-6, flops=0.05 * 1e12,
        dense_flops=1e12, density_asked=0.4, density_achieved=0.3, facts={"dense": source},
    )  # fmt: skip
    return make.record(trial, came_to)


def test_a_share_of_ideal_from_a_computed_dense_time_is_marked_and_explained() -> None:
    found = sweep_brief([run("sdpa"), sparse("dilated", "measured"),
                         sparse("hilbert", "computed from 1,024 of 4,096 rows")])  # fmt: skip
    exact, measured, computed = (row["Share of ideal"] for row in rows_of(found))
    assert (exact, measured, computed) == (None, pytest.approx(0.4), "40.0 %†")
    assert points_of(found)[-1] == "†: the dense time was computed from some of its rows."
    assert any(point.startswith("Share of ideal: ") for point in points_of(found))
    without = sweep_brief([run("sdpa"), sparse("dilated", "measured")])
    assert not any("†" in point for point in points_of(without))


def test_a_search_answers_in_a_row_and_a_sentence() -> None:
    found = search_brief([make.step(1024), make.step(2048, "oom")], ["bracket: wide"])
    (row,) = rows_of(found)
    assert (row["Max tokens"], row["First failure"], row["Limited by"]) == (1024, 2048, "memory")
    assert "Ranks" not in row
    answer, bracket = points_of(found)[-2:]
    assert answer.startswith("sdpa takes 1k tokens, ")
    assert answer.endswith("limited by memory in forward at 2k.")
    assert bracket == "bracket: wide"


def test_searches_on_several_ranks_count_the_tokens_of_all() -> None:
    def searched(ranks: int) -> list[Record]:
        base = make.trial("ring", world_size=ranks, memory_budget=64 * MIB, repeats=0)
        each = [{"peak": (64 - r) * MIB, "own_tokens": 7900} for r in range(ranks)]
        passed = make.record(base.at(7900 * ranks), make.on_ranks(*each), purpose="probe")
        full = make.record(base.at(7964 * ranks), make.outcome("oom", "full"), purpose="edge")
        return [passed, full]

    one, four = rows_of(search_brief(searched(1) + searched(4)))
    assert [four[k] for k in ("Ranks", "Max tokens", "Tokens a rank")] == [4, 31600, 7900]
    assert four["Imbalance"] == pytest.approx(64 / 61)
    assert one["Imbalance"] is None


def test_scaling_adds_theory_and_exponents_to_the_rows() -> None:
    swept = [run("ring", n, seq_len=s) for s in (256, 512, 1024) for n in (1, 2)]
    tables = [t for section in scaling_brief(swept).sections for t in section.tables]
    assert tables[0].columns[1].name == "Tokens"
    assert any(column.name == "Tokens ^" for column in tables[-1].columns)


def test_a_search_for_the_least_sparsity_has_both_ends() -> None:
    steps = [
        make.record(make.trial("block-sparse", options={"sparsity": s}), outcome, purpose="density")
        for s, outcome in ((0.9, make.outcome("oom", "full")), (0.95, make.measured(0.1)))
    ]
    (row,) = rows_of(density_brief(steps))
    assert (row["Least sparsity"], row["Too dense"]) == ("0.95000", "0.90000")
