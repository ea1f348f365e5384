"""What the summary says of sparse attention, recomputed here from the records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest

from longseq_bench.core.cost import attention_flops
from longseq_bench.core.dense_reference import standard_bytes
from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_rate, format_seconds, format_share
from longseq_bench.reports.base import Source
from longseq_bench.reports.sections.sparse import sparse
from tests import make
from tests.reports.test_summary import page, tables

PART = "computed from 1,024 of 131,072 rows"


def run(
    pattern: str = "random",
    time: float = 0.1,
    dense: Sequence[float] = (0.8, 0.9, 1.0),
    source: str = "measured",
    tokens: int = 4096,
    **fields: Any,
) -> Record:
    """A sixteenth of the pairs, in blocks a fifth, a tenth asked."""
    trial = make.trial("block-sparse", tokens, {"pattern": pattern}, **fields)
    whole = attention_flops(trial.workload)
    more = {"density_asked": 0.1, "density_achieved": 0.2}
    more |= {"flops": whole / 16, "dense_flops": whole}
    timed = {"dense_time": dense, "plan_time": 0.002, "uncovered": 0.25}
    came_to = make.measured(time, 2**20, samples=3, **more, **timed)
    return make.record(trial, came_to.model_copy(update={"facts": {"dense": source}}))


def shown(records: list[Record]) -> list[dict[str, str]]:
    return tables(page(records), "Sparse attention")


def said(records: list[Record]) -> str:
    return "\n".join(sparse(Source(records)).points)


def test_every_figure_can_be_recomputed_from_the_record() -> None:
    record = run()
    (row,) = shown([record, make.record()])
    times, dense = record.outcome.samples("time"), record.outcome.samples("dense_time")
    share = median(dense) / 16 / median(times)
    low, high = min(dense) / 16 / max(times), max(dense) / 16 / min(times)
    reduction = standard_bytes(record.trial.workload) / 2**20
    assert row == {
        "Implementation": "block-sparse",
        "Tokens": "4k",
        "Status": "ok",
        "Density asked": "10.0 %",
        "Density achieved": "20.0 %",
        "Density of pairs": "6.2 %",
        "Uncovered": "25.0 %",
        "Plan time": "2 ms",
        "Time": "100 ms ±1 %",
        "Effective FLOP/s": format_rate(
            attention_flops(record.trial.workload) / 16 / median(times), "FLOP/s"
        ),
        "Dense time": format_seconds(0.9),
        "Dense time is": "measured",
        "Speed over dense": "9×",
        "Share of ideal": f"{format_share(share)} ({format_share(low)} to {format_share(high)})",
        "Peak memory": format_bytes(2**20),
        "Memory reduction": f"{reduction:,.0f}×",
        "Standard memory is": "computed",
    }


def test_a_table_a_workload_and_none_of_what_skips_nothing() -> None:
    records = [run(), run(causal=True), run("strided"), make.record()]
    text = page(records)
    part = text.split("## Sparse attention\n", 1)[1].split("\n## ", 1)[0]
    assert part.count("\n### ") == 2
    names = [row["Implementation"] for row in shown(records)]
    assert names == [f"block-sparse pattern={p}" for p in ("random", "strided", "random")]
    full = make.record(make.trial("dilated"), make.measured(density_achieved=1.25))
    assert "Sparse attention" not in page([make.record(), full])


def test_where_figures_come_from_is_said() -> None:
    standard = make.record(make.trial("dense"), make.measured(0.1, 2**23))
    (row,) = shown([run(source=PART), standard])
    assert (row["Dense time is"], row["Standard memory is"]) == (PART, "measured")
    assert row["Memory reduction"] == "8×"
    assert f"dense time {PART}" in said([run(source=PART)])
    assert "dense time" not in said([run()])


def test_the_sentence_names_the_highest_share_and_follows_the_rows() -> None:
    def pair(first: float, second: float) -> str:
        return said([run("random", first), run("strided", second)])

    best = r"At 4k tokens \(.*\), block-sparse pattern=%s \(56\.2 %%: 9× as fast as dense at a "
    best += r"density of 6\.2 %%\) reaches the highest share of ideal of 2, the next is .*=%s"
    assert re.search(best % ("random", "strided"), pair(0.1, 0.2))
    assert re.search(best % ("strided", "random"), pair(0.2, 0.1))
    alike = pair(0.1, 0.105)
    assert "these reach the highest share of ideal and can't be told apart" in alike
    assert "the next is" not in alike


def test_the_sentence_is_of_the_longest_length_that_several_have() -> None:
    records = [run("random", tokens=8192), run("random"), run("strided", 0.3), run("sink", 0.5)]
    assert said(records).startswith("At 4k tokens")
    assert said(records[:1]).endswith("alone has a share of ideal.")


def test_single_samples_tell_no_winner() -> None:
    lone = run("strided", 0.2, dense=[0.9])
    assert "can't be told apart" in said([run("random", 0.1), lone])
    alone = said([run("random", dense=[0.9]), run("strided", 0.2)])
    assert "how far off it may be is not known" in alone
    assert "can't be told apart" not in alone


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"dense": "not run: no room"}, "not run: no room"), ({}, "no dense pass was recorded")],
)
def test_a_share_that_is_missing_has_its_reason(facts: dict[str, str], reason: str) -> None:
    record = run(dense=[])
    record = make.record(record.trial, record.outcome.model_copy(update={"facts": facts}))
    text = page([record, make.record(came_to=make.measured(flops=1.0))])
    (row,) = tables(text, "Sparse attention")
    assert (row["Share of ideal"], row["Dense time"], row["Dense time is"]) == ("—", "—", "—")
    missing = [r for r in tables(text, "Failures") if r.get("Not measured") == "dense_time"]
    assert [(r["Implementation"], r["Reason"]) for r in missing] == [("block-sparse", reason)]


def test_what_failed_stands_there_without_a_figure() -> None:
    failed = run().outcome.model_copy(update={"status": "wrong", "reason": "rows sum to 3"})
    (row,) = shown([make.record(run().trial, failed)])
    assert (row["Status"], row["Time"], row["Share of ideal"]) == ("wrong", "—", "—")
    assert (row["Speed over dense"], row["Memory reduction"]) == ("—", "—")


def test_over_ranks_the_reason_is_told() -> None:
    more = {"density_achieved": 0.2, "flops": 1e9, "dense_flops": 16e9}
    came_to = make.measured(ranks=2, **more)
    record = make.record(make.trial("dilated", world_size=2), came_to)
    section = sparse(Source([record]))
    assert any("Dense time and memory reduction are of one rank" in p for p in section.paragraphs)
    assert "of one rank" not in "".join(sparse(Source([run()])).paragraphs)
    assert shown([record])[0]["Implementation"] == "dilated on 2 ranks"
