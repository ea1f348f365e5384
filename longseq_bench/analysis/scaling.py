"""Growth of maxima with ranks: theory, expectation and measurement."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow


@dataclass(frozen=True)
class RankScaling:
    """The maximum on a number of ranks, with theory and expectation.

    theory: tokens whose floor fills the budgets of all ranks, with O(n/p) memory.
    expected: the maximum on one rank times the ranks; None if one rank was not searched, or if a
    limit other than memory ended either search, because time does not grow linearly.
    """

    label: str
    world_size: int
    theory: int | None
    expected: int | None
    actual: int
    limited_by: str | None


def maxima_on_ranks(maxima: Iterable[SearchRow]) -> list[RankScaling]:
    """Return one item per maximum, grouped by implementation, by ascending ranks."""
    found = []
    for group in group_by(maxima, attrgetter("growth_key")).values():
        one_rank = next((r for r in group if r.world_size == 1 and r.max_tokens), None)
        for row in sorted(group, key=attrgetter("world_size")):
            by_memory = one_rank and {one_rank.limited_by, row.limited_by} == {"memory"}
            expected = one_rank.max_tokens * row.world_size if one_rank and by_memory else None
            of_floor = row.label, row.world_size, row.floor_tokens
            found.append(RankScaling(*of_floor, expected, row.max_tokens, row.limited_by))
    return found
