"""Divisors of a number of heads or ranks."""


def divisors(n: int) -> list[int]:
    """Return every whole number that divides n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]
