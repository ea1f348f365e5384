"""The statistical test of a comparison, by hand and by simulations."""

import math
from collections.abc import Callable
from random import Random

import pytest

from longseq_bench.comparison.significance import (
    SamplesPair,
    adjust_by_holm,
    estimate_ratios,
    find_rounds,
)

Noise = Callable[[Random], float]


def test_a_single_row_is_welchs_test() -> None:
    """By hand: logs 0, 1, 2 and 4, 5, 9; variances 1 and 7; standard error √(8/3);
    64 / (1/2 + 49/2) = 2.56 degrees of freedom, rounded down to 2."""
    a, b = ([math.exp(x) for x in xs] for xs in ((0, 1, 2), (4, 5, 9)))
    (found,) = estimate_ratios([(a, b)])
    assert found.degrees_of_freedom == 2
    assert found.ratio == pytest.approx(math.exp(5))
    t = 5 / math.sqrt(8 / 3)
    assert found.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.adjusted_p == found.p_value
    half = 4.302653 * math.sqrt(8 / 3)
    assert math.log(found.high) == pytest.approx(5 + half, abs=1e-4)
    assert math.log(found.low) == pytest.approx(5 - half, abs=1e-4)
    assert math.log1p(found.detectable) == pytest.approx(half, abs=1e-4)


def test_holm_by_hand() -> None:
    assert adjust_by_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_by_holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])


def test_rows_without_noise_do_not_divide_by_zero() -> None:
    same, different = estimate_ratios([([1.0, 1.0], [1.0, 1.0]), ([1.0, 1.0], [2.0, 2.0])])
    assert (same.ratio, same.p_value) == (1.0, 1.0)
    assert (different.ratio, different.p_value) == (pytest.approx(2.0), 0.0)
    wild = estimate_ratios([([1e-9, 1.0], [1.0, 1e9])] * 30)[0]
    assert math.isfinite(wild.high)


# ---- simulated false alarms and detections ------------------------------------------------------

NORMAL: Noise = lambda rng: rng.gauss(0, 1)  # noqa: E731
SCALES: dict[str, Callable[[Random, int], list[float]]] = {
    "alike": lambda rng, n: [0.02] * n,
    "unlike": lambda rng, n: [0.02 * math.exp(rng.gauss(0, 0.7)) for _ in range(n)],
    "one loud": lambda rng, n: [0.2, *[0.02] * (n - 1)],
    "a quarter loud": lambda rng, n: [0.1] * max(1, n // 4) + [0.02] * (n - max(1, n // 4)),
}


def heavy(rng: Random) -> float:
    """Student's t with 3 degrees of freedom."""
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)


def noisy(
    rng: Random, scales: list[float], rounds: int, shift: float = 0.0, noise: Noise = NORMAL
) -> list[SamplesPair]:
    """A row per scale: `rounds` values per side in logarithms, the second side shifted."""
    return [
        tuple([math.exp(by + s * noise(rng)) for _ in range(rounds)] for by in (0, shift))
        for s in scales
    ]  # type: ignore[misc]


@pytest.mark.parametrize(("rows", "rounds"), [(1, 3), (5, 2), (30, 6), (5, 12)])
@pytest.mark.parametrize("scale", SCALES)
def test_a_false_alarm_is_as_rare_as_stated(scale: str, rows: int, rounds: int) -> None:
    """At most 5 % of comparisons; by chance, 8 of 60 occur once in a hundred runs."""
    alarms = 0
    for i in range(60):
        rng = Random(f"{scale} {rows} {rounds} {i}")
        noise = heavy if i % 2 else NORMAL
        noisy_rows = noisy(rng, SCALES[scale](rng, rows), rounds, 0.0, noise)
        alarms += any(s.adjusted_p <= 0.05 for s in estimate_ratios(noisy_rows))
    assert alarms < 8


def test_the_ratios_of_paired_values_are_tested_as_one_sample() -> None:
    """By hand: logs 1, 2, 3; standard error 1 / √3; t 4.302653 at 2 degrees of freedom."""
    (found,) = estimate_ratios([([1.0] * 3, [math.exp(x) for x in (1, 2, 3)])])
    assert (found.degrees_of_freedom, found.ratio) == (2, pytest.approx(math.exp(2)))
    assert math.log(found.high) == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-4)


def test_a_few_disturbed_processes_hide_no_change_of_many() -> None:
    rng = Random(0)
    a, b = noisy(rng, [0.01], 12, math.log(1.05))[0]
    (found,) = estimate_ratios([([*a[:-1], 2 * a[-1]], [*b[:-1], 1.5 * b[-1]])])
    assert found.ratio == pytest.approx(1.05, abs=0.01)
    assert found.adjusted_p < 0.001


@pytest.mark.parametrize(("rounds", "rows", "power"), [(5, 1, 0.95), (3, 21, 0.85)])
def test_ten_percent_slower_is_found_in_two_percent_noise(
    rounds: int, rows: int, power: float
) -> None:
    found = 0
    for i in range(40):
        noisy_rows = noisy(Random(i), [0.02] * rows, rounds, math.log(1.1))
        found += sum(s.adjusted_p <= 0.05 and s.ratio > 1 for s in estimate_ratios(noisy_rows))
    assert found / (40 * rows) >= power


@pytest.mark.parametrize(("scale", "rounds", "rows"), [("alike", 3, 1), ("unlike", 3, 12)])
def test_the_proposed_rounds_find_the_change(scale: str, rounds: int, rows: int) -> None:
    """Measure some rounds, ask how many are enough for 5 %, and measure that many.

    The change is then found as a rule, and with a third of them it is not.
    """
    proposed, found = 0, {1: 0, 3: 0}
    for i in range(60):
        rng = Random(f"{scale} {rounds} {rows} {i}")
        scales = SCALES[scale](rng, rows)
        enough = find_rounds(noisy(rng, scales, rounds), 0.05)[0]
        if enough is None:
            continue
        proposed += 1
        for part in found:
            later = noisy(rng, scales, max(2, enough // part), math.log(1.05))
            estimate = estimate_ratios(later)[0]
            found[part] += estimate.adjusted_p <= 0.05 and estimate.ratio > 1
    assert proposed >= 50
    assert found[1] >= 0.9 * proposed
    assert found[3] < 0.8 * proposed
