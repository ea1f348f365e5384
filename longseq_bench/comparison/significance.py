"""Test the difference of two sets of times: Welch's t-test on logarithms, with shared variance.

A row is one trial with a few values a side, one value per process: passes inside a process are not
independent. The estimate is the ratio of the two geometric means; with many values a side, of
trimmed ones, by Yuen's version of the test (1974), since a machine now and then disturbs a process.
Reasons, and simulations of the false alarm rate: docs/decisions/0015-compare.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import chdtri, polygamma, psi, stdtr, stdtrit

MIN_SHARED_ROWS = 4  # rows that are needed to estimate a common variance
MAX_PRIOR_DEGREES = 40
MAX_ROUNDS = 1000  # rounds per side beyond which none are proposed
TRIMMED_FROM, TRIMMED_SHARE = 8, 6
"""From so many values on, a sixth of them is left out at either end."""
MISSED, UNDERRATED = 0.1, 0.2
"""For proposed rounds: the chance to miss the change, and that the noise is above its estimate."""

SamplesPair = tuple[Sequence[float], Sequence[float]]
"""The values of one row, above 0: at least two of side A, and of side B.

Of paired values the test gets the ratios as side B, and as many ones as side A: it is then
Student's test of the ratios.
"""
Prior = tuple[int, float]
"""What all rows share: degrees of freedom and the variance of one value; (0, 0.0): nothing."""


@dataclass(frozen=True)
class RatioEstimate:
    """The ratio of one row (geometric mean of B over that of A) and its significance.

    low, high: confidence interval of this row alone.  p_value: two-sided, of this row alone.
    adjusted_p: the p-value after Holm's correction over all rows.
    detectable: the smallest ratio - 1 that would have been significant in Holm's first step.
    """

    ratio: float
    low: float
    high: float
    p_value: float
    adjusted_p: float
    detectable: float
    degrees_of_freedom: int


def estimate_ratios(pairs: Sequence[SamplesPair], level: float = 0.05) -> list[RatioEstimate]:
    """Estimate the ratio of each row by Welch's test; from four rows on they share variance.

    level: the family-wise error rate.
    """
    if not pairs:
        return []
    (difference, inverse_count, variances, degrees, welch), prior = _noise(pairs)
    variances, free = _share_variance(variances, degrees, welch, prior)
    error = np.sqrt(variances * inverse_count)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = abs(difference) / error
    p_values = np.where(error > 0, 2 * stdtr(free, -t), difference == 0)
    half, detectable = (-error * stdtrit(free, p / 2) for p in (level, level / len(pairs)))
    # an interval may exceed the largest float
    logs = np.clip([difference, difference - half, difference + half, detectable], -700, 700)
    ratio, low, high, most = np.exp(logs)
    columns = ratio, low, high, p_values, adjust_by_holm(p_values), most - 1, free.astype(int)
    return [RatioEstimate(*row) for row in zip(*map(np.ndarray.tolist, columns), strict=True)]


def find_rounds(
    pairs: Sequence[SamplesPair], share: float, level: float = 0.05
) -> list[int | None]:
    """Return per row the values a side that would show a change by a share, by the same test.

    The noise is that of these values, at an upper bound, since few values know it badly. The
    change is then found with a probability of about 90 %. None: more than MAX_ROUNDS.
    """
    (_, _, variances, degrees, welch), prior = _noise(pairs)
    variances, free = _share_variance(variances, degrees, welch, prior)
    variances *= free / chdtri(free, 1 - UNDERRATED)
    rounds = np.arange(2, MAX_ROUNDS + 1)
    kept = rounds - 2 * _trimmed(rounds)
    later, free = _share_variance(variances[:, None], 2 * kept - 2, welch[:, None], prior)
    power = -stdtrit(free, level / len(pairs) / 2) - stdtrit(free, MISSED)
    enough = np.sqrt(later * 2 / rounds) * power <= np.log1p(share)
    return [int(rounds[row.argmax()]) if row.any() else None for row in enough]


def adjust_by_holm(p_values: Sequence[float]) -> Any:
    """Adjust p-values for the family-wise error rate (Holm 1979)."""
    p = np.asarray(p_values)
    order = p.argsort()
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return adjusted


def _trimmed(count: Any) -> Any:
    """Return the values that are left out at either end, of so many."""
    return np.where(count >= TRIMMED_FROM, count // TRIMMED_SHARE, 0)


def _noise(pairs: Sequence[SamplesPair]) -> tuple[Any, Prior]:
    """Return arrays with a value per row, of its logarithms, and the prior of the rows.

    The arrays: the difference, 1/nA + 1/nB, the variance of one value, nA + nB - 2 degrees of
    freedom (of the values kept), and the share of them that remains after Welch and Satterthwaite.
    """
    rows = []
    for a, b in pairs:
        (mean_a, error_a, free_a), (mean_b, error_b, free_b) = _mean(a), _mean(b)
        inverse_count, degrees = 1 / len(a) + 1 / len(b), free_a + free_b
        spread = error_a**2 / free_a + error_b**2 / free_b
        welch = (error_a + error_b) ** 2 / spread / degrees if spread else 1.0
        shared = (error_a + error_b) / inverse_count
        rows.append((mean_b - mean_a, inverse_count, shared, degrees, welch))
    noise = np.array(rows).T
    is_known = noise[2] > 0
    return noise, _common_variance(noise[2][is_known], noise[3][is_known])


def _mean(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the trimmed mean of logarithms, its squared error, and the degrees of freedom."""
    logs, out = np.sort(np.log(values)), int(_trimmed(len(values)))
    kept = logs[out : len(logs) - out]
    # values left out count for the error as the nearest one kept
    squares = logs.clip(kept[0], kept[-1]).var() * len(logs)
    return kept.mean(), squares / len(kept) / (len(kept) - 1), len(kept) - 1


def _common_variance(variances: Any, degrees: Any) -> Prior:
    """Fit a scaled inverse chi-square to the rows' log variances (Smyth 2004).

    The more the variances differ, the fewer degrees. Their spread is taken one standard error too
    large: treating unequal rows as equal raises false alarms, while the reverse only hides
    differences.
    """
    if len(variances) < MIN_SHARED_ROWS:
        return 0, 0.0
    logs = np.log(variances) - psi(degrees / 2) + np.log(degrees / 2)
    spread = logs.var(ddof=1) * (1 + np.sqrt(2 / (len(logs) - 1)))
    excess = spread - polygamma(1, degrees / 2).mean()
    prior = int((polygamma(1, np.arange(1, MAX_PRIOR_DEGREES + 1) / 2) >= excess).sum())
    if not prior:
        return 0, 0.0
    return prior, float(np.exp(logs.mean() + psi(prior / 2) - np.log(prior / 2)))


def _share_variance(variances: Any, degrees: Any, welch: Any, prior: Prior) -> tuple[Any, Any]:
    """Blend each variance with the prior's, unless it is larger; return their degrees of freedom.

    Borrowed degrees are cut by Welch's factor too, and all are rounded down.
    """
    total = degrees + prior[0]
    blend = (degrees * variances + prior[0] * prior[1]) / total
    return np.maximum(variances, blend), np.maximum(1, np.floor(welch * total))
