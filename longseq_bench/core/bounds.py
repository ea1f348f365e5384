"""Upper bounds of the numbers that a user gives: a larger one is a slip, not a workload.

Each is far above what any machine runs, and low enough that arithmetic with it takes no time.
"""

from math import isqrt

MAX_TOKENS = 2**40
MAX_NEW_TOKENS = 2**20
MAX_BATCH = 2**20
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**16
MAX_RANKS = 2**16
MAX_THREADS = 2**12
MAX_REPEATS = 10**6
MAX_ROUNDS = 10**4
MAX_SEED = 2**63 - 1
MAX_BYTES = 2**60
MAX_SECONDS = 365 * 86_400
MAX_DOCUMENTS = 2**20
"""Documents of one sequence: their lengths are listed."""
MAX_DRAWN_DOCUMENTS = 2**16
"""Documents of one sequence whose lengths are drawn: they are drawn again for each reader."""


def divisors(n: int) -> list[int]:
    """Return every whole number that divides n, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
