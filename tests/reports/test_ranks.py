"""What a report says of several ranks: recomputed here from the records, and following them."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from longseq_bench.core.model import Record
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from tests import make
from tests.reports.test_summary import built, findings, page, tables

MIB = 2**20
SPREAD = {
    "Ranks", "Tokens a rank", "Compute only", "Communication only", "Exposed", "Speed-up",
    "Efficiency", "Sent a rank", "Least peak", "Imbalance",
}  # fmt: skip


def run(
    name: str = "ring",
    ranks: int = 2,
    time: float = 0.5,
    computing: float = 0.4,
    tokens: int = 4096,
    sent: tuple[int, int] = (3 * MIB, 3 * MIB),
    peaks: tuple[float, ...] = (6 * MIB, 5 * MIB, 4 * MIB, 3 * MIB),
    **fields: Any,
) -> Record:
    """An ok trial; rank r takes r % longer, and its samples lie within 1 %."""

    def near(seconds: float, rank: int) -> list[float]:
        return [seconds * (1 + rank / 100 + i / 1000) for i in range(10)]

    each = [
        {
            "time": near(time, rank), "peak": peaks[rank], "own_tokens": -(-tokens // ranks),
            "bytes_sent": sent[0] if ranks > 1 else 0, "bytes_formula": sent[1] if ranks > 1 else 0,
            "flops": 1e9, "max_error": 1e-6,
        }
        | ({"compute_time": near(computing, rank), "communication_time": near(time / 8, rank)}
           if ranks > 1 else {})
        for rank in range(ranks)
    ]  # fmt: skip
    return make.record(make.trial(name, tokens, world_size=ranks, **fields), make.on_ranks(*each))


def test_every_figure_of_ranks_can_be_recomputed_from_the_records() -> None:
    records = [run(ranks=n, time=t) for n, t in ((1, 0.9), (2, 0.5), (4, 0.3))]
    records += [run("sdpa", 2, 0.7, 0.1)]
    shown = tables(page(records), "Lengths swept")
    assert set(shown[0]) >= SPREAD
    alone = median(records[0].outcome.samples("time"))
    for record, row in zip(records, shown, strict=True):
        ranks = record.trial.world_size
        slowest = [m for m in record.outcome.measurements if m.rank == ranks - 1]
        of = {m.name: m.samples for m in slowest}
        full = median(of["time"])
        peaks = record.outcome.samples("peak")
        assert row["Ranks"] == str(ranks)
        assert row["Tokens a rank"] == format_tokens(4096 // ranks)
        assert row["Time"].split(" ±")[0] == format_seconds(full)
        assert row["Peak memory"] == format_bytes(max(peaks))
        if record.trial.implementation == "ring":
            assert row["Speed-up"] == f"{alone / full:.3g}×"
            assert row["Efficiency"] == format_share(alone / full / ranks)
        else:
            assert (row["Speed-up"], row["Efficiency"]) == ("—", "—")
        if ranks == 1:
            continue
        assert row["Compute only"] == format_seconds(median(of["compute_time"]))
        assert row["Communication only"] == format_seconds(median(of["communication_time"]))
        exposed = max(0.0, 1 - median(of["compute_time"]) / full)
        assert row["Exposed"] == format_share(exposed)
        assert row["Sent a rank"] == "3 MiB"
        assert row["Least peak"] == format_bytes(min(peaks))
        assert row["Imbalance"] == f"{max(peaks) / min(peaks):.3g}×"


def test_where_no_trial_has_several_ranks_nothing_is_said_of_them() -> None:
    text = page([run(ranks=1), run("sdpa", 1), make.step(1024), make.step(2048, "oom")])
    assert not SPREAD & {name for row in tables(text, "Lengths swept") for name in row}
    assert not SPREAD & set(tables(text, "Longest lengths")[0])
    assert "several ranks" not in text
    assert "## Ranks" not in text
    assert " a rank of" not in text


def test_a_workload_without_ranks_keeps_its_table_beside_one_with() -> None:
    shown = tables(page([run(ranks=1, causal=True), run(ranks=2)]), "Lengths swept")
    assert not SPREAD & set(shown[0])
    assert set(shown[1]) >= SPREAD - {"Speed-up", "Efficiency"}
    assert not {"Speed-up", "Wire error"} & set(shown[1])


def test_a_compressed_transfer_shows_the_error_it_causes() -> None:
    came_to = make.measured(ranks=2, wire_error=[1e-3, 2.5e-3])
    (row,) = tables(page([make.record(make.trial(world_size=2), came_to)]), "Lengths swept")
    assert (row["Max error"], row["Wire error"]) == ("1e-06", "0.0025")


def test_each_rank_has_its_figures_in_order() -> None:
    silent = make.on_ranks({"peak": 5 * MIB}, {}, status="crashed", reason="rank 1 died")
    records = [run(ranks=1), run(ranks=2, sent=(5, 7)), run(ranks=4)]
    records += [make.record(make.trial("dense", world_size=2), silent)]
    records += [make.record(make.trial("sdpa", world_size=2), make.outcome("unsupported", "no"))]
    rows = tables(page(records), "Ranks")
    assert [(row["Implementation"], row["Ranks"]) for row in rows] == [
        ("ring", "2"), ("ring", "4"), ("dense", "2"),
    ]  # fmt: skip
    two, four, dead = rows
    for row, record in ((two, records[1]), (four, records[2])):
        each = [m for m in record.outcome.measurements if m.name == "time"]
        times = " · ".join(format_seconds(median(m.samples)) for m in each)
        assert row["Time of each rank"] == times
        peaks = record.outcome.samples("peak")
        assert row["Peak of each rank"] == " · ".join(map(format_bytes, peaks))
    assert (two["Sent by each rank"], two["By formula"]) == ("5 B · 5 B", "7 B · 7 B")
    assert (dead["Status"], dead["Time of each rank"]) == ("crashed", "—")
    assert dead["Peak of each rank"] == "5 MiB · —"


def searched(ranks: int, longest: int) -> list[Record]:
    base = make.trial("ring", world_size=ranks, memory_budget=64 * MIB, repeats=0)
    each = [{"peak": (60 - 5 * r) * MIB, "own_tokens": longest // ranks + r} for r in range(ranks)]
    return [
        make.record(base.at(longest), make.on_ranks(*each), purpose="probe"),
        make.record(base.at(longest + 9), make.outcome("oom", "rank 0: full"), purpose="edge"),
    ]


def test_a_maximum_on_ranks_says_what_each_held_and_how_it_grew() -> None:
    text = page(searched(1, 2000) + searched(4, 7800))
    one, four = tables(text, "Longest lengths")
    assert (one["Ranks"], one["Tokens a rank"], one["Imbalance"]) == ("1", "2,000", "—")
    assert (four["Ranks"], four["Max tokens"], four["Tokens a rank"]) == ("4", "7,800", "1,953")
    assert (four["Peak memory"], four["Least peak"]) == ("60 MiB", "45 MiB")
    assert four["Imbalance"] == f"{60 / 45:.3g}×"
    (row,) = tables(text, "Ranks")
    assert row["Peak of each rank"] == "60 MiB · 55 MiB · 50 MiB · 45 MiB"
    said = findings(searched(1, 2000) + searched(4, 7800))
    assert "ring on 4 ranks takes 7,800 tokens" in said
    assert ", 3.9× one rank's, not confirmed" in said
    assert "one rank's" not in findings(searched(2, 2000) + searched(4, 7800))
    assert "one rank's" not in findings(searched(1, 2000))


# sentences


def test_the_sentences_on_ranks_follow_the_rows() -> None:
    def said(one: float, two: float) -> str:
        records = [run(name, 1, 0.9) for name in ("one", "two")]
        records += [run("one", 2, 0.5, one), run("two", 2, 0.6, two)]
        return findings(records)

    first = said(0.45, 0.3)
    assert "on 1 ranks" not in first
    assert "At 4k tokens on 2 ranks (forward, float32" in first
    shares = [format_share(1 - c / t) for c, t in ((0.45, 0.5), (0.3, 0.6))]
    assert (
        f"one ({shares[0]} of its time, 3 MiB sent a rank) exposes least communication of 2, "
        f"the next is two ({shares[1]} of its time, 3 MiB sent a rank)."
    ) in first
    assert "two (10.0 % of its time, 3 MiB sent a rank) exposes least communication of 2" in said(
        0.25, 0.54
    )
    alike = said(0.45, 0.54)
    assert "these expose least communication and can't be told apart: " in alike
    assert "exposes least" not in alike
    fast = (0.9 * 1.0045) / (0.5 * 1.0145)
    assert (
        f"one ({fast:.3g}× as fast as one rank, {format_share(fast / 2)} efficiency) scales best "
        "of 2, the next is two ("
    ) in first


def test_what_scales_alike_is_not_ranked_and_the_worst_is_named() -> None:
    times = {"one": 0.5, "two": 0.501, "bad": 2.0}
    records = [run(name, n, 0.9 if n == 1 else t) for name, t in times.items() for n in (1, 2)]
    said = findings(records)
    assert "these scale best and can't be told apart: one (" in said
    slow = (0.9 * 1.0045) / (2.0 * 1.0145)
    assert f"; worst, bad ({slow:.3g}× as fast as one rank, " in said
    assert "alone was run on one rank too" in findings([run(ranks=1), run(ranks=2)])
    assert "one rank" not in findings([run("one"), run("two")])


def test_no_winner_is_named_from_single_samples() -> None:
    records = []
    for name, time in (("one", 0.5), ("two", 0.6), ("three", 0.9)):
        records.append(make.record(make.trial(name), make.measured(1.0, samples=1)))
        once = make.measured(time, samples=1, ranks=2, compute_time=0.4)
        records.append(make.record(make.trial(name, world_size=2), once))
    said = findings(records)
    alike = [f"{name} ({{}}" for name in ("one", "two", "three")]
    assert "least communication and can't be told apart: " + ", ".join(
        words.format(f"{format_share(1 - 0.4 / t)} of its time)")
        for words, t in zip(alike, (0.5, 0.6, 0.9), strict=True)
    ) in said  # fmt: skip
    assert "these scale best and can't be told apart: one (2×" in said
    assert "scales best" not in said
    assert "exposes least" not in said


def test_a_single_sample_does_not_win_over_many() -> None:
    once = make.measured(0.4, samples=1, ranks=2, compute_time=0.38)
    records = [run("many", 1, 0.9), run("many", 2, 0.5, 0.3), run("once", 1, 0.9)]
    records += [make.record(make.trial("once", world_size=2), once)]
    said = findings(records)
    assert "least communication and can't be told apart: once (5.0 % of its time), many (" in said
    assert "these scale best and can't be told apart: once (" in said


def test_ranks_are_spoken_of_at_the_longest_length_that_several_ran() -> None:
    records = [run(name, 2, tokens=n) for name in ("one", "two") for n in (1024, 2048)]
    records += [run("one", 2, tokens=8192), run("one", 4, tokens=512)]
    said = findings(records)
    assert "At 2k tokens on 2 ranks" in said
    assert "At 512 tokens on 4 ranks" in said
    assert "At 8k tokens on 2 ranks" not in said


def test_uneven_memory_is_named() -> None:
    records = [run("even", peaks=(6 * MIB, 6 * MIB)), run("odd", peaks=(528 * MIB, 8 * MIB))]
    said = findings(records)
    assert "memory is least even with odd, whose ranks' largest and least peak are" in said
    assert "528 MiB and 8 MiB (66×)" in said
    alike = [run("even", peaks=(6 * MIB, 6 * MIB)), run("odd", peaks=(6 * MIB, 6 * MIB - 1))]
    assert "least even" not in findings(alike)


def test_lowest_memory_is_a_ranks_where_there_are_ranks() -> None:
    assert "has the lowest peak memory a rank of 2" in findings([
        run("one"), run("two", peaks=(9 * MIB, 9 * MIB)),
    ])  # fmt: skip


def test_bytes_that_are_not_those_of_the_formula_are_a_finding() -> None:
    unlike = findings([run(sent=(3_145_728, 2_000_000)), run("fine")])
    assert "ring on 2 ranks at 4k tokens (forward" in unlike
    assert "sent 3,145,728 B from each of ranks 0, 1 in a pass; its formula says 2,000,000 B." in (
        unlike
    )
    assert "fine on 2 ranks at 4k tokens" not in unlike
    assert "its formula says" not in findings([run(), run("fine")])


# what is missing, what hangs


def test_what_was_not_measured_on_ranks_has_its_reason() -> None:
    record = make.record(make.trial(world_size=2), make.measured(ranks=2, flops=1.0))
    reasons = [
        (row["Not measured"], row["Reason"])
        for row in tables(page([record]), "Failures")
        if "Not measured" in row
    ]
    assert reasons == [
        ("compute_time", "no pass without communication was recorded"),
        ("bytes_sent", "no bytes were counted"),
    ]


def hung(stacks: Any, **fields: Any) -> Record:
    came_to = make.outcome("hang", "rank 1 was stopped", "communication", {"stacks": stacks})
    return make.record(make.trial("ring", world_size=2, **fields), came_to)


def test_a_hang_shows_where_each_rank_stood() -> None:
    stacks = {
        "1": ["  File b.py, line 2, in read"],
        "0": ["  File `a`.py, line 1, in wait", "main"],
    }
    text = page([hung(stacks), hung(stacks, round=1)])
    assert text.count("## Hang: ring at 4k tokens on 2 ranks") == 1
    part = text.split("## Hang: ", 1)[1]
    assert "ended in communication: rank 1 was stopped." in part
    assert part.split("```")[1] == (
        "\nrank 0:\n    File `a`.py, line 1, in wait\n  main\n"
        "rank 1:\n    File b.py, line 2, in read\n"
    )
    failed = tables(text, "Failures")[0]
    assert (failed["Status"], failed["Reason"]) == ("hang", "rank 1 was stopped")


def test_long_stacks_are_cut_and_equal_ones_told_once() -> None:
    deep = [f"File {i}" for i in range(40)]
    text = page([hung({"10": deep, "2": deep, "0": ["alone"]})])
    lines = text.split("```")[1].strip().splitlines()
    assert lines[:3] == ["rank 0:", "  alone", "ranks 2, 10:"]
    assert lines[-2:] == ["  File 15", "  … 24 more in the record"]


@pytest.mark.parametrize("stacks", [None, {}, "no stack", 3])
def test_a_hang_without_stacks_has_no_section(stacks: Any) -> None:
    document = built([hung(stacks)])
    assert not [section.title for section in document.sections if "Hang" in section.title]


def test_hangs_of_other_trials_are_told_apart() -> None:
    text = page([hung({"0": ["a"]}), hung({"0": ["b"]}, causal=True)])
    assert text.count("## Hang: ") == 2
