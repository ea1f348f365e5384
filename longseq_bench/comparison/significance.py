"""Test the difference of two sets of times: Welch's t-test on logarithms, with shared variance.

A row is one trial with a few values a side, one value per process: passes inside a process are not
independent. The estimate is the ratio of the two geometric means. Reasons, and simulations of the
false alarm rate: docs/decisions/0015-compare.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, variance

MIN_SHARED_ROWS = 4  # rows that are needed to estimate a common variance
MAX_PRIOR_DEGREES = 40
MAX_ROUNDS = 1000
"""Rounds per side beyond which none are proposed."""
MISSED, UNDERRATED = 0.1, 0.2
"""For proposed rounds: the chance to miss the change, and that the noise is above its estimate."""
PLANNED_DEGREES = 60  # more degrees of freedom change a quantile by less than 3 %

Pair = tuple[Sequence[float], Sequence[float]]
"""The values of one row: side A, side B."""


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


def estimate_ratios(pairs: Sequence[Pair], level: float = 0.05) -> list[RatioEstimate]:
    """Estimate the ratio of each row by Welch's test; from four rows on they share variance.

    level: the family-wise error rate.  Values are above 0.
    Raises ValueError for a side with fewer than two values.
    """
    rows, prior = _noise(pairs)
    errors = [row.standard_error(*prior) for row in rows]
    p_values = [
        two_sided(row.difference / error, degrees) if error else float(row.difference == 0)
        for row, (error, degrees) in zip(rows, errors, strict=True)
    ]
    tested = zip(rows, errors, p_values, adjust_by_holm(p_values), strict=True)
    return [
        RatioEstimate(
            ratio=bounded_exp(row.difference),
            low=bounded_exp(row.difference - error * quantile(level, degrees)),
            high=bounded_exp(row.difference + error * quantile(level, degrees)),
            p_value=p_value,
            adjusted_p=adjusted,
            detectable=bounded_exp(error * quantile(level / len(rows), degrees)) - 1,
            degrees_of_freedom=degrees,
        )
        for row, (error, degrees), p_value, adjusted in tested
    ]


def find_rounds(pairs: Sequence[Pair], share: float, level: float = 0.05) -> list[int | None]:
    """Return per row the values a side that would show a change by a share, by the same test.

    The noise is that of these values, at an upper bound, since few values know it badly. The
    change is then found with a probability of about 90 %. None: more than MAX_ROUNDS.
    Raises ValueError for a side with fewer than two values.
    """
    rows, prior = _noise(pairs)
    return [_rounds_of(row, prior, math.log1p(share), level / len(rows)) for row in rows]


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for the family-wise error rate (Holm 1979).

    The probability that any true null hypothesis has an adjusted p-value below a level is at most
    that level.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def two_sided(t: float, degrees: int) -> float:
    """Return P(|T| > |t|) of Student's t with a whole number of degrees of freedom, from 1 up.

    The closed form of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(degrees))
    term = total = math.cos(angle) if degrees % 2 else 1.0
    for k in range(3 if degrees % 2 else 2, degrees, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    if degrees % 2:
        inside = 2 / math.pi * (angle + (inside if degrees > 1 else 0.0))
    return min(1.0, max(0.0, 1 - inside))


@cache
def quantile(probability: float, degrees: int) -> float:
    """Return the t with P(|T| > t) = probability, by bisection to 12 digits."""
    high = 1.0
    while two_sided(high, degrees) > probability and high < 1e12:
        high *= 2
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, degrees) > probability else (low, middle)
    return high


@dataclass(frozen=True)
class _RowNoise:
    """The difference of one row in logarithms, and its noise.

    variance: of one value.  inverse_count: 1/nA + 1/nB.  pooled_degrees: nA + nB - 2.
    welch_degrees: degrees of freedom after Welch and Satterthwaite.
    """

    difference: float
    variance: float
    inverse_count: float
    pooled_degrees: int
    welch_degrees: float

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> _RowNoise:
        if min(len(a), len(b)) < 2:
            raise ValueError("a side has fewer than two values")
        error_a, error_b = variance(a) / len(a), variance(b) / len(b)
        inverse_count = 1 / len(a) + 1 / len(b)
        denominator = error_a**2 / (len(a) - 1) + error_b**2 / (len(b) - 1)
        pooled = len(a) + len(b) - 2
        welch = (error_a + error_b) ** 2 / denominator if denominator else float(pooled)
        shared = (error_a + error_b) / inverse_count
        return cls(fmean(b) - fmean(a), shared, inverse_count, pooled, welch)

    def standard_error(self, prior_degrees: int, prior_variance: float) -> tuple[float, int]:
        """Return the standard error of the difference and its degrees of freedom, rounded down.

        A row with more variance than the prior keeps its own. Borrowed degrees of freedom are cut
        by Welch's factor too.
        """
        free = self.welch_degrees * (1 + prior_degrees / self.pooled_degrees)
        error = math.sqrt(self.shared_variance(prior_degrees, prior_variance) * self.inverse_count)
        return error, max(1, int(free))

    def shared_variance(self, prior_degrees: int, prior_variance: float) -> float:
        """Return the row's variance, or that blended with the prior's if it is larger."""
        degrees = prior_degrees + self.pooled_degrees
        blend = (prior_degrees * prior_variance + self.pooled_degrees * self.variance) / degrees
        return max(self.variance, blend)

    def with_rounds(self, rounds: int, variance: float) -> _RowNoise:
        """Return the same row with this many values a side and this variance of one value."""
        degrees = 2 * rounds - 2
        welch = self.welch_degrees / self.pooled_degrees * degrees
        return _RowNoise(self.difference, variance, 2 / rounds, degrees, welch)


def _noise(pairs: Sequence[Pair]) -> tuple[list[_RowNoise], tuple[int, float]]:
    """Return the noise of each row, and the prior that they share (0, 0.0 for few rows)."""
    rows = [_RowNoise.of([math.log(x) for x in a], [math.log(x) for x in b]) for a, b in pairs]
    return rows, _common_variance(rows) if len(rows) >= MIN_SHARED_ROWS else (0, 0.0)


def _rounds_of(row: _RowNoise, prior: tuple[int, float], change: float, level: float) -> int | None:
    """Return the fewest rounds that show a change of the logarithm at the level of one row."""
    _, free = row.standard_error(*prior)
    variance = row.shared_variance(*prior) * free / _chi_square_quantile(UNDERRATED, free)

    def is_enough(rounds: int) -> bool:
        error, degrees = row.with_rounds(rounds, variance).standard_error(*prior)
        degrees = min(degrees, PLANNED_DEGREES)
        return error * (quantile(level, degrees) + quantile(2 * MISSED, degrees)) <= change

    choices = range(2, MAX_ROUNDS + 1)
    found = bisect_left(choices, True, key=is_enough)
    return choices[found] if found < len(choices) else None


def _chi_square_quantile(probability: float, degrees: int) -> float:
    """Return the x with P(chi-square < x) = probability (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    z = NormalDist().inv_cdf(probability)
    return float(degrees * (1 - spread + z * math.sqrt(spread)) ** 3)


def _common_variance(rows: Sequence[_RowNoise]) -> tuple[int, float]:
    """Fit a scaled inverse chi-square to the rows' log variances (Smyth 2004).

    Returns the prior's degrees of freedom and its variance. The more the variances differ, the
    fewer degrees. Their spread is taken one standard error too large: treating unequal rows as
    equal raises false alarms, while the reverse only hides differences.
    """
    known = [row for row in rows if row.variance > 0]
    if len(known) < MIN_SHARED_ROWS:
        return 0, 0.0
    logs = [math.log(r.variance) - _log_mean(r.pooled_degrees) for r in known]
    spread = variance(logs) * (1 + math.sqrt(2 / (len(known) - 1)))
    excess = spread - fmean(_log_variance(r.pooled_degrees) for r in known)
    degrees = 0
    while degrees < MAX_PRIOR_DEGREES and _log_variance(degrees + 1) >= excess:
        degrees += 1
    return degrees, math.exp(fmean(logs) + _log_mean(degrees)) if degrees else 0.0


@cache
def _log_mean(degrees: int) -> float:
    """Return the mean of log(chi-square / degrees), a digamma function."""
    euler = 0.57721566490153286
    mean = -euler - (2 * math.log(2) if degrees % 2 else 0.0)
    for k in range(2 - degrees % 2, degrees, 2):
        mean += 2 / k
    return mean - math.log(degrees / 2)


@cache
def _log_variance(degrees: int) -> float:
    """Return the variance of log(chi-square), a trigamma function."""
    found = math.pi**2 / (2 if degrees % 2 else 6)
    for k in range(2 - degrees % 2, degrees, 2):
        found -= (2 / k) ** 2
    return found


def bounded_exp(log: float) -> float:
    """Return e**log; an interval, or a ratio of hostile times, may exceed the largest float."""
    return math.exp(max(-700.0, min(log, 700.0)))
