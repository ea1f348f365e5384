"""Tables for a terminal: what stands in them, that they fit, and that one rank changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, RenderableType

from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.cli.progress import outcome_words, trial_words
from longseq_bench.cli.tables import (
    Column,
    Fitted,
    maxima_table,
    rows_table,
    sweep_columns,
    trials_table,
)
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import Record
from tests import make

MIB = 2**20
ONE_RANK = "tokens time ± peak FLOP/s error × sdpa"
SEVERAL = (
    "tokens ranks a rank time ± speed-up efficiency exposed sent peak least max/min FLOP/s error"
    " × sdpa"
)


def run(name: str, ranks: int, time: float = 0.1, **fields: Any) -> Record:
    more = {"own_tokens": 4096 // ranks, "bytes_sent": 3 * MIB, "flops": 1e9}
    each = [
        {"time": [time * (1 + i / 1000) for i in range(6)], "peak": (8 - rank) * MIB,
         "max_error": 1e-6} | more | ({"compute_time": time * 0.9} if ranks > 1 else {})
        for rank in range(ranks)
    ]  # fmt: skip
    trial = make.trial(name, world_size=ranks, memory_budget=64 * MIB, **fields)
    return make.record(trial, make.on_ranks(*each))


def several() -> list[Record]:
    ring = {"order": "zigzag", "queries": "partitioned"}
    return [
        run("sdpa", 1, 0.08),
        run("ring", 1, 0.1, options=ring),
        run("ring", 2, 0.0625, options=ring),
        run("ring", 2, 0.07, options=ring | {"order": "contiguous"}),
        run("ring", 2, 0.09, options=ring | {"queries": "full"}),
        make.record(
            make.trial("sdpa", world_size=2, memory_budget=64 * MIB),
            make.outcome("unsupported", "runs on one rank", "start"),
        ),
    ]


def lines(table: RenderableType, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def headings(told: list[str]) -> str:
    return next(" ".join(line.split()) for line in told if "peak" in line)


def test_one_rank_has_the_columns_it_always_had() -> None:
    told = lines(rows_table([run("sdpa", 1), run("ring", 1)], "sdpa"), 200)
    assert headings(told) == ONE_RANK
    assert not any("rank" in line and "budget" not in line for line in told)
    found = lines(maxima_table([make.step(1024), make.step(2048, "oom")]), 200)
    assert headings(found) == "longest first failure limited by of floor peak runs"
    assert not any("rank" in line for line in found)


def test_several_ranks_have_their_columns() -> None:
    told = lines(rows_table(several(), "sdpa"), 200)
    assert headings(told) == SEVERAL
    (row,) = [line for line in told if "zigzag queries=partitioned" in line and " 2 " in line]
    assert row.split()[3:] == [
        "4k", "2", "2k", "62.7", "ms", "0%", "1.60", "80.0", "%", "10.2", "%", "3", "MiB", "8",
        "MiB", "7", "MiB", "1.14", "16", "G", "1e-06", "1.28",
    ]  # fmt: skip
    assert any("exposed: share of the time that communication adds" in line for line in told)
    assert "sdpa on 2 ranks at 4k: unsupported in start: runs on one rank" in told


def test_a_workload_on_one_rank_keeps_its_columns_beside_one_on_several() -> None:
    told = lines(rows_table([run("sdpa", 1, causal=True), run("sdpa", 2)], None), 200)
    heads = [" ".join(line.split()) for line in told if "peak" in line and "tokens" in line]
    assert heads[0] == ONE_RANK.removesuffix(" × sdpa")
    assert heads[1] == SEVERAL.removesuffix(" × sdpa")


@pytest.mark.parametrize("width", range(80, 201, 5))
def test_tables_of_ranks_fit_and_what_matters_most_stays(width: int) -> None:
    told = lines(rows_table(several(), "sdpa"), width)
    assert max(map(len, told)) <= width
    assert not any("…" in line for line in told)
    shown = headings(told)
    for word in ("tokens", "ranks", "time", "speed-up", "exposed", "peak"):
        assert word in shown
    assert all(any(label in line for line in told) for label in ("queries=partitioned", "sdpa"))
    left_out = next((line for line in told if line.startswith("no room for")), "")
    assert ("error" in shown) != ("error" in left_out)
    assert "62.7 ms" in " ".join(told)


def test_the_least_important_go_first() -> None:
    gone = []
    for width in range(200, 79, -1):
        shown = headings(lines(rows_table(several(), "sdpa"), width))
        for word in ("error", "FLOP/s", "least", "sent", "±", "a rank", "max/min", "× sdpa"):
            if word not in shown and word not in gone:
                gone.append(word)
    assert gone == ["error", "FLOP/s", "least", "sent", "±", "a rank", "max/min", "× sdpa"]


@pytest.mark.parametrize("width", range(20, 80, 6))
def test_where_nothing_may_leave_columns_leave_whole(width: int) -> None:
    rows = sweep_rows(several())
    told = lines(Fitted(rows, sweep_columns(rows)), width)
    assert max(map(len, told)) <= width
    left_out = " ".join(" ".join(told).split()).partition("no room for ")[2].partition(":")[0]
    for word in ("tokens", "ranks", "time", "speed-up", "exposed", "peak"):
        assert (word in told[0].split()) != (word in left_out.split(", ")), word
    for time in ("80.2 ms", "62.7 ms"):
        assert any(time in line for line in told) != ("time" in left_out.split(", "))


def test_a_cell_is_not_made_a_picture() -> None:
    column = Column("x", lambda row: ":smile:")
    assert lines(Fitted([":smile:"], [column], label=str), 40)[1] == ":smile:  :smile:"


def searched(ranks: int) -> list[Record]:
    base = make.trial("ring", world_size=ranks, memory_budget=64 * MIB, repeats=0)
    tokens = 7900 * ranks
    each = [{"peak": (64 - r) * MIB, "own_tokens": 7900} for r in range(ranks)]
    return [
        make.record(base.at(tokens), make.on_ranks(*each), purpose="probe"),
        make.record(base.at(tokens + 64), make.outcome("oom", "rank 0: full"), purpose="edge"),
    ]


@pytest.mark.parametrize("width", [80, 100, 130, 200])
def test_maxima_of_ranks_fit(width: int) -> None:
    told = lines(maxima_table(searched(1) + searched(4)), width)
    assert max(map(len, told)) <= width
    (row,) = [line.split() for line in told if "31,600" in line and line.split()[1] == "4"]
    assert row[:3] == ["ring", "4", "31,600"]
    said = " ".join(" ".join(told).split())
    assert "ring on 4 ranks: 31,600 tokens (float32, forward) under 64 MiB a rank" in said
    assert "ring: 7,900 tokens (float32, forward) under 64 MiB; limited by: memory" in said
    if width == 200:
        assert "7,900" in row
        assert "1.05" in row


def test_a_dry_run_says_the_ranks_where_there_are_several() -> None:
    trials = [make.trial(world_size=n) for n in (1, 4)]
    told = lines(trials_table(trials, 1), 120)
    assert "ranks" in told[0]
    assert ["sdpa", "4k", "4", "float32"] in [line.split()[:4] for line in told]
    assert "ranks" not in lines(trials_table(trials[:1], 1), 120)[0]


def test_progress_says_the_ranks_and_the_slowest_of_them() -> None:
    each = [{"time": [1.0, 4.0], "peak": 8 * MIB}, {"time": [3.0, 2.0], "peak": 4 * MIB}]
    record = make.record(make.trial("ring", world_size=2), make.on_ranks(*each))
    assert trial_words(record.trial) == "ring 4k float32 on 2 ranks"
    assert outcome_words(record) == "3.5 s ±14%, peak 8 MiB a rank"
    assert "rank" not in trial_words(make.trial()) + outcome_words(make.record())


def test_a_name_with_brackets_is_shown_as_it_is() -> None:
    records = [run("odd[x]", 1), run("odd[x]", 2)]
    told = lines(rows_table(records, "odd[x]"), 200)
    assert "× odd[x]" in headings(told)
    assert any(line.startswith("odd[x]") for line in told)


def sparse(name: str, share: float, source: str = "measured", **fields: Any) -> Record:
    """A time of 0.1 s at a density of 0.05 in pairs, 0.4 asked and 0.3 in blocks."""
    dense, trial = share / 0.05 * 0.1, make.trial(name, memory_budget=64 * MIB, **fields)
    whole = attention_flops(trial.workload)
    came_to = make.outcome(
        time=[0.1] * 6, dense_time=[dense] * 6, peak=3 * MIB, max_error=1e-6, flops=0.05 * whole,
        dense_flops=whole, density_asked=0.4, density_achieved=0.3, facts={"dense": source},
    )  # fmt: skip
    return make.record(trial, came_to)


LONG = {"pattern": "dilated-sparse", "sparsity": 0.9, "block": 128}
SPARSE = "tokens time ± density of ideal peak FLOP/s error × sdpa"


def sparse_and_exact() -> list[Record]:
    part = "computed from 1,024 of 4,096 rows"
    return [
        run("sdpa", 1),
        sparse("block-sparse", 0.4, options=LONG),
        sparse("block-sparse", 0.25, part, options=LONG | {"pattern": "global-local"}),
    ]


def test_sparse_rows_bring_density_and_the_share_of_ideal() -> None:
    told = lines(rows_table(sparse_and_exact(), "sdpa"), 200)
    assert headings(told) == SPARSE
    found = {line.split()[0] + line.split()[1]: line.split() for line in told if " 4k " in line}
    assert found["sdpa4k"][5:7] == ["—", "—"]
    assert found["block-sparsepattern=dilated-sparse"][6:10] == ["5.0", "%", "40.0", "%"]
    assert found["block-sparsepattern=global-local"][6:10] == ["5.0", "%", "25.0", "%†"]
    said = " ".join(" ".join(told).split())
    assert "of ideal: dense time × density over time" in said
    assert "†: dense time computed from some of its rows" in said
    assert "†" not in " ".join(lines(rows_table(sparse_and_exact()[:2], "sdpa"), 200))


@pytest.mark.parametrize("width", [80, 90, 100, 120])
def test_a_sparse_table_fits_and_keeps_the_share(width: int) -> None:
    told = lines(rows_table(sparse_and_exact(), "sdpa"), width)
    assert max(map(len, told)) <= width
    shown = headings(told)
    for word in ("tokens", "time", "density", "of ideal"):
        assert word in shown
    assert "25.0 %†" in " ".join(told)


def test_over_ranks_sparse_rows_have_their_density() -> None:
    told = lines(rows_table([*several(), sparse("dilated", 0.4)], None), 200)
    assert "± density speed-up" in headings(told)
    assert "density" not in headings(lines(rows_table(several(), None), 200))
