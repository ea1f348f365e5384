"""Campaigns of random and hostile input, run by hand; `.ci/run` runs a short seed of some."""

from collections.abc import Iterable


def print_failures(failures: Iterable[str]) -> int:
    """Print each failure as it is found, then their number. Return the exit code."""
    count = 0
    for failure in failures:
        count += 1
        print(failure, flush=True)
    print(f"{count:,} failures")
    return 1 if count else 0
