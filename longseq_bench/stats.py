"""Medians and how sure they are, without assuming a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

CONFIDENCE = 0.95


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high): the 95 % interval of the median by order statistics.

    Between the i-th smallest and the i-th largest sample lies the median with probability
    1 - 2 P(Binomial(n, 1/2) < i). Fewer than six samples can't reach 95 %: then it is their whole
    range. Raises ValueError for no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    n = len(ordered)
    tail, outside = 0.0, 0
    for i in range(n // 2):
        tail += comb(n, i) / 2**n
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside = i
    return ordered[outside], median(ordered), ordered[n - 1 - outside]


def settled(samples: Sequence[float], within: float) -> bool:
    """Whether the median's 95 % interval lies within a fraction of it; never before six samples."""
    if len(samples) < 6:
        return False
    low, middle, high = median_interval(samples)
    return high - middle <= within * middle and middle - low <= within * middle
