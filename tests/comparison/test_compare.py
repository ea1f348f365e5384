"""Comparisons: matching, verdicts, the gate, caveats and the report."""

from collections.abc import Sequence
from typing import Any

import pytest

from longseq_bench.analysis.runs import REMEDY
from longseq_bench.comparison.compare import compare
from longseq_bench.comparison.document import comparison_document
from longseq_bench.comparison.verdict import (
    Change,
    Comparison,
    decide,
    find_regressions,
    name_row,
    summarize,
)
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Environment, Record
from tests import make
from tests.reports.reading import cells

MIB = 2**20
ALPHA = make.environment("alpha")
STEADY = (0.100, 0.101, 0.099, 0.1005, 0.0995)


def rounds(
    name: str = "ulysses", times: Sequence[float] = STEADY, where: Environment = ALPHA,
    peak: float = MIB, at: str = "2026-11-21T09:00:00Z", ranks: int = 1, **fields: Any,
) -> list[Record]:  # fmt: skip
    """A record per time, each a process with passes around it."""
    return [
        make.record(
            make.trial(name, round=i, world_size=ranks, **fields),
            make.measured(time, peak, samples=5, ranks=ranks), where, started_at=at,
        )
        for i, time in enumerate(times)
    ]  # fmt: skip


def times(by: float) -> list[float]:
    return [by * t for t in STEADY]


def swept(*by: float) -> list[Record]:
    """Trials of 64, 128, ... tokens, each slower by a factor."""
    return [r for i, factor in enumerate(by) for r in rounds(times=times(factor), seq_len=64 << i)]


def sentences(found: Comparison) -> str:
    return " ".join(summarize(found, found.min_change))


def only(found: Comparison) -> Any:
    (row,) = found.times
    return row


# ---- times -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "verdict"), [(1.1, "slower"), (0.9, "faster"), (1.0, "same"), (1.005, "same")]
)
def test_a_ratio_has_an_interval_and_a_verdict(by: float, verdict: str) -> None:
    row = only(compare(rounds(), rounds(times=times(by))))
    assert row.verdict == verdict
    assert row.ratio == pytest.approx(by)
    assert row.b.time_s / row.a.time_s == pytest.approx(row.ratio)
    assert row.estimate.low < by < row.estimate.high
    assert row.a_rounds == pytest.approx(STEADY)


def test_samples_are_processes_not_passes() -> None:
    """Fifty passes of two processes give two independent samples."""
    wide = (0.1, 0.12)
    few = only(compare(rounds(times=wide), rounds(times=times(1.1)[:2])))
    many = [
        r.model_copy(update={"outcome": make.measured(t, samples=50)})
        for r, t in zip(rounds(times=wide), wide, strict=True)
    ]
    assert only(compare(many, rounds(times=times(1.1)[:2]))).estimate.p_value == pytest.approx(
        few.estimate.p_value
    )


def test_a_change_below_the_minimum_is_not_reported() -> None:
    exact = [0.1 + i * 1e-6 for i in range(5)]
    a, b = rounds(times=exact), rounds(times=[1.03 * t for t in exact])
    assert only(compare(a, b)).verdict == "slower"
    assert only(compare(a, b, min_change=0.05)).verdict == "same"


def test_all_rows_are_tested_together() -> None:
    """A change that is significant alone at 5 % is not significant among thirty rows."""
    a, b = rounds(times=STEADY[:3]), rounds(times=[1.03 * t for t in STEADY[:3]])
    assert only(compare(a, b)).verdict == "slower"
    more = [r for i in range(29) for r in rounds(seq_len=64 + i, times=(0.1, 0.11, 0.09))]
    assert compare(a + more, b + more).times[0].verdict == "same"
    assert compare(a, b, level=0.001).times[0].verdict == "same"


@pytest.mark.parametrize(
    ("of_a", "of_b", "reason"),
    [(1, 1, "one process per side"), (1, 5, "A has only one process"), (5, 1, "B has only one")],
)
def test_one_process_decides_nothing(of_a: int, of_b: int, reason: str) -> None:
    found = compare(rounds(times=STEADY[:of_a]), rounds(times=times(3)[:of_b]))
    row = only(found)
    assert (row.verdict, row.estimate) == ("undecided", None)
    assert reason in row.reason
    assert "rounds: 3 or more" in row.reason
    assert "Times: 1 undecided." in sentences(found)
    assert find_regressions(found, 0.05) == []


# ---- matching ----------------------------------------------------------------------------------


def test_repetition_is_not_part_of_the_identity_of_a_trial() -> None:
    b = rounds(times=times(1.1), repeats=3, time_cap=0.5, seed=7)
    assert only(compare(rounds(), b)).verdict == "slower"


@pytest.mark.parametrize(
    "field", [{"seq_len": 64}, {"causal": True}, {"threads": 1}, {"keep": "nothing"}]
)
def test_other_fields_are_part_of_the_identity_of_a_trial(field: dict[str, Any]) -> None:
    found = compare(rounds() + rounds("ring"), rounds() + rounds("ring", **field))
    assert [t.a.implementation for t in found.times] == ["ulysses"]
    assert (len(found.only_a), len(found.only_b)) == (1, 1)
    assert "1 trial or search is only in B." in sentences(found)


def test_budgets_may_differ_and_are_reported() -> None:
    found = compare(rounds(memory_budget=64 * MIB), rounds(memory_budget=128 * MIB, time_budget=5))
    assert only(found).note == "memory budgets 64 MiB and 128 MiB; time budgets none and 5 s"
    both = rounds(memory_budget=64 * MIB) + rounds(memory_budget=128 * MIB, times=times(2))
    found = compare(both, both)
    assert [t.ratio for t in found.times] == [1, 1]
    assert [t.note for t in found.times] == ["", ""]


def test_software_may_differ_and_is_reported() -> None:
    newer = make.environment(
        "alpha", torch="2.14.0", commit="def5678", memory_bytes=8 * 2**30 + 9,
        power_limits_w=(500.0,),
    )  # fmt: skip
    found = compare(rounds(), rounds(where=newer))
    assert only(found).verdict == "same"
    assert found.differences == [
        ("commit", "abc1234", "def5678"), ("torch", "2.13.0", "2.14.0"),
        ("power limits in W", "none", "1 × 500.0"),
    ]  # fmt: skip


UNLIKE = [
    {"cpu": "Other CPU"}, {"cores": 4}, {"memory_bytes": 9 * 2**30}, {"gpus": ("H100",)},
    {"driver": "550"},
]  # fmt: skip


@pytest.mark.parametrize("field", UNLIKE)
def test_different_machines_are_refused_by_default(field: dict[str, Any]) -> None:
    b = rounds(times=times(2), where=make.environment("alpha", **field))
    with pytest.raises(
        UserError, match=r"measured on different machines \(.* and .*\); --across-machines"
    ):
        compare(rounds(), b)
    found = compare(rounds(), b, any_machine=True)
    assert only(found).verdict == "slower"
    assert len(found.differences) == 1


def test_trials_on_different_machines_are_not_only_in_one_side() -> None:
    """Some of B's trials and its search ran on another machine: they are not "only in B"."""
    other, spare = make.environment("beta", cpu="Other CPU"), make.environment("gamma")
    b = rounds(seq_len=64) + rounds(where=other, times=times(2), seq_len=128)
    b += rounds("ring", seq_len=64, where=spare) + rounds("new", where=other)
    away = [r.model_copy(update={"environment": other}) for r in search(1000, 1010)]
    a = swept(1, 1) + rounds("ring", seq_len=64) + rounds("gone") + search(1000, 1010)
    found = compare(a, b + away)
    assert [name_row(t.a) for t in found.times] == ["ulysses at 64"]
    assert [name_row(what) for what in found.other_machines] == [
        "ulysses at 128",
        "ring at 64",
        "ulysses",
    ]
    assert [[name_row(w) for w in side] for side in (found.only_a, found.only_b)] == [
        ["gone at 4k"], ["new at 4k"],
    ]  # fmt: skip
    assert sentences(found).endswith(
        "3 trials or searches are in both, but on different machines (host alpha and beta; CPU "
        "Test CPU and Other CPU; host alpha and gamma): not compared; --across-machines compares "
        "them."
    )
    with pytest.raises(
        UserError, match=r"\(host alpha and beta; .*\); --fail-on would ignore them"
    ):
        decide(found, 0.05)
    every = compare(a, b + away, any_machine=True)
    assert (every.other_machines, len(every.times), len(every.maxima)) == ([], 3, 1)
    assert decide(every, 0.05).word == "FAIL"


# ---- memory, maxima, failures ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (28, 32, "same"), (28, 91, "same"), (28, 92, "more"),
        (102400, 103400, "same"), (102400, 103424, "more"),
    ],
)  # fmt: skip
def test_peaks_that_differ_by_a_few_pages_or_below_1_percent_are_the_same(
    a: int, b: int, verdict: str
) -> None:
    """In KiB."""
    for one, other, word in ((a, b, verdict), (b, a, verdict.replace("more", "less"))):
        (row,) = compare(rounds(peak=one * 1024), rounds(peak=other * 1024)).peaks
        assert (row.verdict, row.ratio) == (word, pytest.approx(other / one))


def search(passed: int, failed: int | None, status: Any = "oom", **fields: Any) -> list[Record]:
    of = make.trial("ulysses", memory_budget=64 * MIB, repeats=0)
    steps = [make.step(passed, of=of, **fields)] if passed else []
    return steps + ([make.step(failed, status, of=of, **fields)] if failed else [])


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (search(1000, 1010), search(1005, 1015), "same"),
        (search(1000, 1010), search(1010, 1020), "longer"),
        (search(1000, 1010), search(990, 1000), "shorter"),
        (search(1000, None), search(5000, None), "same"),
        (search(1000, 1010), search(0, 64), "shorter"),
        (search(1000, 1010, "timeout"), search(950, 960, "timeout"), "undecided"),
        (search(1000, 1010, "timeout"), search(800, 810, "timeout"), "shorter"),
    ],
)
def test_maxima_by_their_brackets(a: list[Record], b: list[Record], verdict: str) -> None:
    (row,) = compare(a, b).maxima
    assert row.verdict == verdict
    assert ("one search per side" in row.reason) == (verdict == "undecided")


def failed(status: Any, implementation: str = "ulysses", **fields: Any) -> list[Record]:
    return [make.record(make.trial(implementation, **fields), make.outcome(status, f"{status}!"))]


def turned(a: list[Record], b: list[Record]) -> Change:
    (one,) = compare(a, b).statuses
    return one


def test_a_trial_that_fails_only_in_b_is_broken_and_has_no_time() -> None:
    assert turned(rounds(), failed("wrong")).verdict == "broken"
    assert turned(failed("oom"), rounds()).verdict == "mended"
    assert turned(failed("oom"), failed("crashed")).verdict == "otherwise"
    assert compare(rounds(), rounds() + failed("wrong", round=9)).times == []
    same = compare(failed("oom"), failed("oom"))
    assert (same.statuses, same.failed_alike) == ([], 1)
    assert "1 trial failed in the same way in both." in sentences(same)


# ---- the gate ----------------------------------------------------------------------------------


def test_a_smaller_budget_breaks_nothing() -> None:
    a, b = rounds(memory_budget=2 * MIB), failed("oom", memory_budget=MIB)
    found = compare(a, b)
    assert turned(a, b).note == "memory budgets 2 MiB and 1 MiB"
    assert find_regressions(found, 0.05) == []
    assert find_regressions(compare(a, failed("wrong", memory_budget=MIB)), 0.05)


# ---- the verdict -------------------------------------------------------------------------------

LOUD = (0.1, 0.13, 0.09)


def verdict_of(
    a: list[Record], b: list[Record], fail_on: float | None = 0.05, **options: Any
) -> tuple[str, str]:
    found = decide(compare(a, b, **options), fail_on)
    return found.word, found.reason


def test_anything_worse_by_the_share_is_fail_and_the_worst_is_named() -> None:
    assert verdict_of(swept(1, 1, 1), swept(1.1, 1.3, 1)) == (
        "FAIL", "ulysses at 128 is 30 % slower, and 1 more figure is worse.",
    )  # fmt: skip
    assert verdict_of(rounds(causal=True), failed("wrong", causal=True)) == (
        "FAIL", "ulysses at 4k (causal) is no longer ok: wrong: wrong!.",
    )  # fmt: skip
    more = "ulysses at 4k takes 50 % more memory."
    assert verdict_of(rounds(), rounds(peak=1.5 * MIB)) == ("FAIL", more)
    shorter = search(1000, 1010), search(900, 910)
    assert verdict_of(*shorter) == ("FAIL", "ulysses reaches 10 % fewer tokens.")
    assert find_regressions(compare(*shorter), 0.2) == []
    assert verdict_of(swept(1), swept(1.1), 0.2) == (
        "PASS", "nothing is worse by 20 % or more in 1 trial.",
    )  # fmt: skip


def test_without_a_share_any_detected_change_for_the_worse_is_fail() -> None:
    assert verdict_of(rounds(), rounds(times=times(1.03)), None)[0] == "FAIL"
    assert verdict_of(rounds(), rounds(times=times(1.03)), 0.05)[0] == "PASS"
    assert verdict_of(rounds(), rounds(times=times(0.9)), None) == (
        "PASS", "nothing is worse in 1 trial.",
    )  # fmt: skip
    assert verdict_of(rounds(), rounds(), None)[0] == "TOO NOISY"  # 1 % could not have been seen


def test_too_noisy_is_a_series_in_which_no_length_could_have_shown_the_change() -> None:
    """A length that could is enough for its own series, and no help for another one."""
    loud = rounds(times=LOUD, seq_len=64)
    assert verdict_of(loud, loud)[0] == "TOO NOISY"
    one_clear = loud + rounds(seq_len=128)
    assert verdict_of(one_clear, one_clear) == (
        "PASS", "nothing is worse by 5 % or more in 2 trials; 1 of them could not have shown it.",
    )  # fmt: skip
    for other in ({"name": "topk"}, {"causal": True}, {"ranks": 2}):
        both = loud + rounds(**{"seq_len": 128, **other})
        word, reason = verdict_of(both, both)
        assert word == "TOO NOISY"
        assert reason.startswith("1 of 2 trials could not have shown a slow-down of 5 %; ")
        assert reason.endswith(" rounds per side would be enough.")


def test_one_process_a_side_is_too_noisy_and_three_rounds_are_proposed() -> None:
    once = rounds(times=STEADY[:1])
    assert verdict_of(once, once) == (
        "TOO NOISY",
        "1 of 1 trial could not have shown a slow-down of 5 %; 3 or more rounds per side show the "
        "noise.",
    )


def test_a_search_limited_by_time_that_is_shorter_within_its_noise_is_too_noisy() -> None:
    a, b = search(1000, 1010, "timeout"), search(930, 940, "timeout")
    assert verdict_of(a, b) == (
        "TOO NOISY",
        "ulysses reaches 7 % fewer tokens; limited by time: with one search per side, 10 % may be "
        "noise.",
    )
    assert verdict_of(a, b, 0.08)[0] == "PASS"
    assert verdict_of(b, a)[0] == "PASS"


def test_trials_that_b_lacks_are_in_the_verdict() -> None:
    assert verdict_of(rounds() + rounds("ring"), rounds()) == (
        "PASS", "nothing is worse by 5 % or more in 1 trial; 1 of A not in B.",
    )  # fmt: skip


# ---- caveats -----------------------------------------------------------------------------------


def notes(a: list[Record], b: list[Record]) -> str:
    return " ".join(compare(a, b).caveats)


def test_the_same_records_on_both_sides_are_reported() -> None:
    a = [*swept(1, 1), *search(1000, 1010)]
    alone = "The compared records are the same on both sides: identical records can't differ."
    assert compare(a, a).caveats == [alone]
    copied = [Record.model_validate_json(r.model_dump_json(by_alias=True)) for r in a]
    assert compare(a, copied).caveats == [alone]
    assert "both sides" not in notes(swept(1, 1), swept(1.1, 1.1))
    assert "both sides" not in notes(rounds(), rounds(at="2026-11-22T09:00:00Z"))


def test_unstable_trials_of_either_side_are_reported() -> None:
    loaded = make.environment("beta", cores=2, load=(9.0, 1.0, 1.0))
    a = rounds() + rounds(seq_len=64)
    b = rounds(where=loaded) + rounds(seq_len=64, where=loaded)
    found = compare(a, b, any_machine=True).caveats
    unstable = [caveat for caveat in found if "nstable" in caveat]
    reason = "ulysses at 4k (load 9.0 on 2 cores) and 1 more trial"
    assert unstable == [f"Unstable in B: {reason}; {REMEDY}."]
    assert f"Unstable in A: {reason}" in " ".join(compare(b, a, any_machine=True).caveats)


# ---- the document ------------------------------------------------------------------------------

HOSTILE = "a|b<i>\n[x]`"


def everything() -> Comparison:
    """Rows of every kind, with names that need escaping."""
    a, b = [], []
    for n, by in ((64, 1.2), (128, 1.0)):
        a += rounds(HOSTILE, seq_len=n)
        b += rounds(HOSTILE, times(by), peak=1.5 * MIB, seq_len=n)
    a += rounds("once", times=STEADY[:1]) + rounds("gone") + search(1000, 1010)
    b += rounds("once", times=STEADY[:1]) + failed("wrong", implementation="gone")
    b += search(900, 910) + rounds("ring", ranks=2)
    return compare(a, b, ("old|", "new<"))


def test_the_summary_counts_the_verdicts_of_the_table() -> None:
    found = compare(swept(1.0), swept(1.0), ("a", "b"))
    (one,) = found.times
    assert one.estimate
    assert (one.verdict, one.estimate.detectable > found.min_change) == ("same", True)
    for share, word in ((0.001, "too noisy"), (0.5, "same")):
        document = comparison_document(found, share)
        assert f"Times: 1 {word}." in document.sections[0].points
        tables = [table for section in document.sections for table in section.tables]
        assert any(line["Verdict"] == word for table in tables for line in cells(table))


def test_the_document_has_every_comparison() -> None:
    found = {s.title: s for s in comparison_document(everything(), 0.05).sections}
    assert list(found) == ["Result", "Not compared", "2 rows unchanged"]
    shown = {table.title: cells(table) for table in found["Result"].tables}
    workload = "forward, float32, not causal, batch 1, 8 heads of 64, cpu"
    assert list(shown) == [
        f"Times, {workload}", f"Peak memory, {workload}",
        f"Longest lengths, {workload}, 64 MiB", "Different status",
    ]  # fmt: skip
    times, peaks, (search,), (change,) = shown.values()
    slow, once = times
    assert (slow["Implementation"], slow["Tokens"], slow["Verdict"]) == (HOSTILE, 64, "slower")
    assert slow["Low"] < slow["Ratio"] < slow["High"]
    assert once["Verdict"] == "undecided"
    assert "one process per side" in str(once["Note"])
    assert {row["Verdict"] for row in peaks} == {"more"}
    assert [search[k] for k in ("A", "A fails at", "B", "B fails at")] == [1000, 1010, 900, 910]
    assert (change["A"], change["B"], change["Verdict"]) == ("ok", "wrong: wrong!", "broken")
    assert found["Not compared"].points == ["Only in B: ring ×2 at 4k"]
    assert any("no longer ok: wrong" in point for point in found["Result"].points)


def test_nothing_to_compare_is_not_a_pass() -> None:
    assert verdict_of(failed("oom"), failed("oom")) == (
        "TOO NOISY", "there is no figure to compare; 1 trial failed in both.",
    )  # fmt: skip
    assert verdict_of(failed("oom"), rounds()) == ("PASS", "nothing is worse by 5 % or more.")
