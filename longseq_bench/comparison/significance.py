"""Whether two sets of runs differ by more than their noise: Student's t in logarithms, by rows.

A row has a few values a side, one a process, as passes inside a process are not independent of
each other. What is compared is the ratio of two geometric means. The reasons, and simulations of
how often it is wrong: docs/decisions/0015-compare.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, variance

LEAST_ROWS = 4
"""With fewer, nothing can be said of how noise differs over rows, and none is borrowed."""
MOST_BORROWED = 40
"""Degrees of freedom."""

Pair = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Shift:
    """How the second side of a row lies to the first.

    ratio: of geometric means, second over first; low, high: between what it lies with certainty
    1 - level, taken alone.  p: of a difference as large by noise alone; adjusted: the same by
    Holm's method over all rows together.  seen_from: the least ratio - 1 that could have been
    significant had it been the only one.  free: degrees of freedom.
    """

    ratio: float
    low: float
    high: float
    p: float
    adjusted: float
    seen_from: float
    free: int


def shifts(pairs: Sequence[Pair], level: float = 0.05) -> list[Shift]:
    """One a row. Values are above 0, two a side at least; raises ValueError for fewer.

    Welch's test, but where there are four rows or more the variance is not taken below what the
    rows have in common, and gains its degrees of freedom.
    """
    rows = [_Noise.of([math.log(x) for x in a], [math.log(x) for x in b]) for a, b in pairs]
    prior = _common(rows) if len(rows) >= LEAST_ROWS else None
    sure = [row.with_others(*prior) if prior else row.alone() for row in rows]
    ps = [_p(row.shift, error, free) for row, (error, free) in zip(rows, sure, strict=True)]
    found = []
    for row, (error, free), p, adjusted in zip(rows, sure, ps, holm(ps), strict=True):
        half, first = (error * quantile(share, free) for share in (level, level / len(rows)))
        low, high = (_exp(row.shift + way * half) for way in (-1, 1))
        seen = _exp(first) - 1
        found.append(Shift(math.exp(row.shift), low, high, p, adjusted, seen, free))
    return found


def holm(ps: Sequence[float]) -> list[float]:
    """p-values of which as many may be compared with one level as there are: the chance that any
    is below it by noise alone is not above it (Holm 1979)."""
    found = [1.0] * len(ps)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        found[i] = largest
    return found


def two_sided(t: float, free: int) -> float:
    """The chance of a Student's t farther from 0, in whole degrees of freedom from 1 up: the closed
    form of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(free))
    term = total = math.cos(angle) if free % 2 else 1.0
    for k in range(3 if free % 2 else 2, free, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    if free % 2:
        inside = 2 / math.pi * (angle + (inside if free > 1 else 0.0))
    return min(1.0, max(0.0, 1 - inside))


@cache
def quantile(share: float, free: int) -> float:
    """The t that is farther from 0 with this chance, to 12 digits."""
    high = 1.0
    while two_sided(high, free) > share and high < 1e12:
        high *= 2
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, free) > share else (low, middle)
    return high


@dataclass(frozen=True)
class _Noise:
    """A row: its shift in logarithms, the variance of a value, how many values the difference of
    means is worth (as 1 over), and degrees of freedom: nominal, and after Welch and Satterthwaite.
    """

    shift: float
    variance: float
    share: float
    nominal: int
    welch: float

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> _Noise:
        if min(len(a), len(b)) < 2:
            raise ValueError("a side has fewer than two values")
        of_a, of_b = variance(a) / len(a), variance(b) / len(b)
        share = 1 / len(a) + 1 / len(b)
        under = of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1)
        nominal = len(a) + len(b) - 2
        welch = (of_a + of_b) ** 2 / under if under else float(nominal)
        return cls(fmean(b) - fmean(a), (of_a + of_b) / share, share, nominal, welch)

    def alone(self) -> tuple[float, int]:
        """The standard error and its degrees of freedom, rounded down."""
        return math.sqrt(self.variance * self.share), max(1, int(self.welch))

    def with_others(self, borrowed: int, common: float) -> tuple[float, int]:
        """The same with what rows have in common. A row that is noisier than that keeps its own
        variance; Welch's share of the degrees of freedom goes for borrowed ones too."""
        blend = (borrowed * common + self.nominal * self.variance) / (borrowed + self.nominal)
        free = self.welch * (1 + borrowed / self.nominal)
        return math.sqrt(max(self.variance, blend) * self.share), max(1, int(free))


def _common(rows: Sequence[_Noise]) -> tuple[int, float]:
    """How many degrees of freedom the rows lend each other, and the variance they have in common:
    a scaled inverse chi-square fitted to log variances (Smyth 2004).

    The more they differ the fewer; their spread is taken a standard error too large, as to take
    unequal rows for equal ones raises false alarms and the reverse only hides differences.
    """
    known = [row for row in rows if row.variance > 0]
    if len(known) < LEAST_ROWS:
        return 0, 0.0
    logs = [math.log(r.variance) - _log_mean(r.nominal) for r in known]
    spread = variance(logs) * (1 + math.sqrt(2 / (len(known) - 1)))
    left = spread - fmean(_log_variance(r.nominal) for r in known)
    borrowed = 0
    while borrowed < MOST_BORROWED and _log_variance(borrowed + 1) >= left:
        borrowed += 1
    return borrowed, math.exp(fmean(logs) + _log_mean(borrowed)) if borrowed else 0.0


@cache
def _log_mean(free: int) -> float:
    """The mean of the logarithm of a chi-square over its degrees of freedom: a digamma."""
    euler = 0.57721566490153286
    found = -euler - (2 * math.log(2) if free % 2 else 0.0)
    for k in range(2 - free % 2, free, 2):
        found += 2 / k
    return found - math.log(free / 2)


@cache
def _log_variance(free: int) -> float:
    """The variance of that logarithm: a trigamma."""
    found = math.pi**2 / (2 if free % 2 else 6)
    for k in range(2 - free % 2, free, 2):
        found -= (2 / k) ** 2
    return found


def _exp(log: float) -> float:
    """Of two processes a side the interval may reach beyond all floats."""
    return math.exp(min(log, 700.0))


def _p(shift: float, error: float, free: int) -> float:
    if error == 0:
        return 1.0 if shift == 0 else 0.0
    return two_sided(shift / error, free)
