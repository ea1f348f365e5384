"""Medians and their confidence intervals, without assuming a distribution."""

from collections.abc import Sequence
from functools import cache

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
    tail, outside, term = 0, 0, 1
    max_tail = (1 - CONFIDENCE) / 2
    for i in range(n // 2):
        tail += term
        # whole numbers neither round nor overflow
        if tail > int(max_tail * 2**53) << (n - 53) if n > 53 else tail > max_tail * 2**n:
            break
        outside, term = i, term * (n - i) // (i + 1)
    return outside


def settled(samples: Sequence[float], within: float) -> bool:
    """Return True if the median's 95 % interval is within a fraction of it; needs six samples."""
    if len(samples) < 6:
        return False
    low, middle, high = median_interval(samples)
    return high - middle <= within * middle and middle - low <= within * middle
