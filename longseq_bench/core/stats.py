"""Medians and their confidence intervals, without assuming a distribution."""

from collections.abc import Sequence
from functools import cache
from math import exp, lgamma, log, sqrt

CONFIDENCE = 0.95


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return (low, median, high): the median's 95 % interval by order statistics.

    The median is between the i-th smallest and the i-th largest sample with probability
    1 - 2 P(Binomial(n, 1/2) < i). Fewer than six samples can't reach 95 %: the interval is then
    their whole range. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    n = len(ordered)
    outside = _outside(n)
    middle = ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
    return ordered[outside], middle, ordered[n - 1 - outside]


@cache
def _outside(n: int) -> int:
    """Return the number of samples, of n, outside the interval at each end."""
    # start ten standard deviations below the mean: less than 1e-22 is below
    first = max(0, int(n / 2 - 5 * sqrt(n)))
    term = exp(lgamma(n + 1) - lgamma(first + 1) - lgamma(n - first + 1) - n * log(2))
    tail, outside = 0.0, first
    for i in range(first, n // 2):
        tail += term
        if tail > (1 - CONFIDENCE) / 2:
            break
        outside, term = i, term * (n - i) / (i + 1)
    return outside


def settled(samples: Sequence[float], within: float) -> bool:
    """Return True if the median's 95 % interval is within a fraction of it; needs six samples."""
    if len(samples) < 6:
        return False
    low, middle, high = median_interval(samples)
    return high - middle <= within * middle and middle - low <= within * middle
