"""Divisors of a number of heads or ranks."""

from math import isqrt


def divisors(n: int) -> list[int]:
    """Return every whole number that divides n, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
