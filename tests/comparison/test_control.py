"""Comparisons on a machine that is not steady: controls, signs of other work, sides in turn."""

from random import Random
from typing import Any

import pytest

from benchmarks.compare import busy_pair, changed_pair, run_in_turn
from longseq_bench.comparison.compare import compare
from longseq_bench.comparison.verdict import Comparison, decide
from longseq_bench.core.model import Record
from tests import make
from tests.comparison.test_compare import MIB, STEADY, failed, rounds, search, times

OWN = "att.py:att"
OLD, NEW = {"name": OWN, "source": "0" * 16}, {"name": OWN, "source": "1" * 16}


def verdicts(found: Comparison) -> dict[str, str]:
    return {f"{t.a.implementation} {t.a.tokens}": t.verdict for t in found.times}


def first_words(found: Comparison, fail_on: float = 0.05) -> tuple[str, str]:
    verdict = decide(found, fail_on)
    return verdict.word, verdict.reason


# ---- controls ------------------------------------------------------------------------------------


def test_a_change_is_found_by_the_ratio_to_a_control_on_a_slower_machine() -> None:
    b = rounds("sdpa", times(2)) + rounds(times=times(2.16), **NEW)
    found = compare(rounds("sdpa") + rounds(**OLD), b)
    judged, control = found.times
    assert (judged.ratio, judged.control) == (pytest.approx(1.08), "sdpa")
    assert (control.ratio, control.verdict) == (pytest.approx(2), "control")
    over = "times are over those of sdpa, which is the same in both."
    assert first_words(found) == ("FAIL", f"att at 4k is 8 % slower; {over}")
    b = rounds("sdpa", times(2)) + rounds(times=times(2), **NEW)
    assert first_words(compare(rounds("sdpa") + rounds(**OLD), b)) == (
        "PASS", f"nothing is worse by 5 % or more in 1 trial; {over}",
    )  # fmt: skip


def test_ratios_are_those_of_each_round() -> None:
    """The machine's speed changes by half from round to round, for both rows alike."""
    speeds = (1, 1.5, 0.9, 1.3, 0.8)
    changing = [t * by for t, by in zip(STEADY, speeds, strict=True)]
    b = rounds("sdpa", changing) + rounds(times=[1.08 * t for t in changing], **NEW)
    found = compare(rounds("sdpa") + rounds(**OLD), b)
    assert found.times[0].estimate.low == pytest.approx(1.08, abs=0.01)
    assert first_words(found)[0] == "FAIL"


def test_the_noise_of_the_control_is_in_the_interval() -> None:
    loud = (0.1, 0.13, 0.09, 0.12, 0.08)
    b = rounds("sdpa", loud[::-1]) + rounds(**NEW)
    found = compare(rounds("sdpa", loud) + rounds(**OLD), b)
    assert found.times[0].estimate.detectable > 0.2
    assert first_words(found)[0] == "TOO NOISY"


NEWER = make.environment("alpha", torch="2.14.0")
OTHER_COMMIT = make.environment("alpha", commit="def5678")
DIRTY = make.environment("alpha", commit="abc1234-dirty")


@pytest.mark.parametrize(
    ("of_a", "of_b", "control"),
    [
        ({"name": "sdpa"}, {"name": "sdpa"}, True),
        ({"name": "sdpa"}, {"name": "sdpa", "where": OTHER_COMMIT}, True),
        ({"name": "sdpa"}, {"name": "sdpa", "where": NEWER}, False),
        ({"name": "ring"}, {"name": "ring"}, True),
        ({"name": "ring"}, {"name": "ring", "where": OTHER_COMMIT}, False),
        ({"name": "ring", "where": DIRTY}, {"name": "ring", "where": DIRTY}, False),
        ({"name": "plugin"}, {"name": "plugin"}, False),
        ({**OLD, "name": "b.py:other"}, {**OLD, "name": "b.py:other"}, True),
        ({**OLD, "name": "b.py:other"}, {**NEW, "name": "b.py:other"}, False),
        ({"name": "sdpa", "threads": 1}, {"name": "sdpa", "threads": 1}, False),
        ({"name": "sdpa", "seq_len": 64}, {"name": "sdpa", "seq_len": 64}, False),
        ({"name": "sdpa", "ranks": 2}, {"name": "sdpa", "ranks": 2}, False),
        ({"name": "sdpa", "times": STEADY[:4]}, {"name": "sdpa"}, False),
    ],
)  # fmt: skip
def test_a_control_has_the_same_code_versions_workload_and_rounds(
    of_a: dict[str, Any], of_b: dict[str, Any], control: bool
) -> None:
    found = compare(rounds(**of_a) + rounds(**OLD), rounds(**of_b) + rounds(**NEW))
    judged = next(t for t in found.times if t.a.implementation == OWN)
    assert bool(judged.control) == control


def test_sdpa_is_preferred_and_controls_are_not_judged_at_lengths_where_they_are_alone() -> None:
    def side(by: float) -> list[Record]:
        both = rounds("ring", times(by)) + rounds("sdpa", times(by))
        return both + rounds("sdpa", times(by), seq_len=64)

    found = compare(side(1), side(1.5))
    assert verdicts(found) == {"ring 4096": "same", "sdpa 4096": "control", "sdpa 64": "control"}
    assert first_words(found)[0] == "PASS"


# ---- without a control ---------------------------------------------------------------------------


def busy(by: float, share: float) -> list[Record]:
    """Rounds of an edited function whose passes had a share of a core."""
    outcomes = [make.measured(t, samples=5, cpu_time=[share * t] * 5) for t in times(by)]
    made = zip(rounds(**NEW), outcomes, strict=True)
    return [r.model_copy(update={"outcome": outcome}) for r, outcome in made]


def swept_apart(by: float, at: str = "2026-11-22") -> list[Record]:
    return [r for n in (64, 128, 256) for r in rounds(times=times(by), at=at, seq_len=n)]


@pytest.mark.parametrize("by", [1.52, 0.7])
@pytest.mark.parametrize(
    ("sides", "sign"),
    [
        (lambda by: (rounds("sdpa"), rounds("sdpa", times(by))), "The machine changed: sdpa at 4k"),
        (lambda by: (busy(1, 2.0), busy(by, 1.0)), "(CPU time per second is 50 % lower than in A)"),
        (lambda by: (swept_apart(1, "2026-11-20"), swept_apart(by)), "changed by a similar ratio"),
    ],
    ids=["same code", "CPU time", "all alike"],
)
def test_an_unsteady_machine_is_neither_pass_nor_fail(by: float, sides: Any, sign: str) -> None:
    found = compare(*sides(by))
    word, reason = first_words(found)
    assert word == "TOO NOISY"
    assert reason.startswith("the machine was not steady (see Cautions), and no control corrects ")
    assert any(sign in caution for caution in found.caveats)
    assert set(verdicts(found).values()) == {"too noisy"}


def test_sides_that_took_turns_and_changed_alike_did_change() -> None:
    a = swept_apart(1, "2026-11-20") + swept_apart(1, "2026-11-24")
    assert first_words(compare(a, swept_apart(1.3)))[0] == "FAIL"


def test_a_change_of_a_version_is_a_change_of_sdpa() -> None:
    found = compare(rounds("sdpa"), rounds("sdpa", times(1.5), where=NEWER))
    assert first_words(found) == ("FAIL", "sdpa at 4k is 50 % slower.")


def test_memory_and_wrong_results_are_judged_on_an_unsteady_machine_but_no_limit_of_time() -> None:
    a, b = rounds("sdpa"), rounds("sdpa", times(1.5))
    assert first_words(compare(a, rounds("sdpa", times(1.5), peak=2 * MIB)))[0] == "FAIL"
    wrong, late = (failed(status, "new") for status in ("wrong", "timeout"))
    assert first_words(compare(a + rounds("new"), b + wrong))[1].startswith(
        "new at 4k is no longer"
    )
    a, b = a + rounds("ring"), b + rounds("ring", times(1.5))
    assert first_words(compare(a + rounds("new"), b + late))[0] == "PASS"
    longer, shorter = search(1000, 1010, "timeout"), search(800, 810, "timeout")
    assert first_words(compare(a + longer, b + shorter)) == (
        "TOO NOISY",
        "ulysses reaches 20 % fewer tokens; limited by time: the machine was not steady.",
    )


def test_simulated_comparisons_are_right_on_a_machine_whose_speed_changes() -> None:
    """The records of `benchmarks/compare.py --simulate`."""
    words = [decide(busy_pair(Random(i), i % 2), 0.05).word for i in range(20)]
    assert words == ["TOO NOISY"] * 20
    for make_pair, share, by in ((changed_pair, 0.05, 1.08), (run_in_turn, None, 1.03)):
        found = [decide(make_pair(Random(i), by), share).word for i in range(20)]
        assert found.count("FAIL") >= 18
        unchanged = [decide(make_pair(Random(i), 1.0), share).word for i in range(20)]
        assert unchanged.count("FAIL") <= 1
