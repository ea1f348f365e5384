"""Growth of maxima and times with tokens and ranks: theory, measurement, fitted exponents.

A power law is fitted in logarithms by least squares, with 95 % intervals of its exponents by
Student's t. Computed from rows only.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import STANDARD


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


@dataclass(frozen=True)
class Exponent:
    """A fitted exponent with its 95 % interval.

    The bounds are None if there are no more points than parameters.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Complexity:
    """Exponents of a quantity in tokens n and ranks p: fitted, and by formula.

    quantity: time (s) or memory (peak bytes of a rank).  formula_*: for time, exponents of the
    FLOPs per rank; for memory, of the floor, or of the score matrix of standard attention.
    ranks: None if all ran on one number. Both are None if tokens and ranks varied together.
    """

    label: str
    quantity: Literal["time", "memory"]
    points: int
    tokens: Exponent | None
    ranks: Exponent | None
    formula_tokens: float | None
    formula_ranks: float | None


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


def complexities(rows: Iterable[SweepRow]) -> list[Complexity]:
    """Return exponents of time and memory of implementations swept at three lengths or more."""
    groups = group_by((row for row in rows if row.status == "ok"), attrgetter("growth_key"))
    return [
        fit
        for group in groups.values()
        for fit in (_fit(group, "time", "time_s"), _fit(group, "memory", "peak_bytes"))
        if fit
    ]


def _fit(
    group: Sequence[SweepRow], quantity: Literal["time", "memory"], name: str
) -> Complexity | None:
    known = [row for row in group if (value := getattr(row, name)) and value > 0]
    if len({row.tokens for row in known}) < 3:
        return None
    several = len({row.world_size for row in known}) > 1
    quantities = ("tokens", "world_size") if several else ("tokens",)
    columns = [[math.log(getattr(row, x)) for row in known] for x in quantities]
    fitted = power_law(columns, [math.log(getattr(row, name)) for row in known])
    of_tokens, of_ranks = [*fitted, None, None][:2]
    if quantity == "time":
        formula = _flops_exponent(known)
    else:
        # a whole score matrix is quadratic; the floor is linear
        formula = 2.0 if known[0].implementation == STANDARD else 1.0
    shared = -1.0 if several else None
    return Complexity(known[0].label, quantity, len(known), of_tokens, of_ranks, formula, shared)


def _flops_exponent(rows: Sequence[SweepRow]) -> float | None:
    work = [(math.log(row.tokens), math.log(row.flops)) for row in rows if row.flops]
    if len({tokens for tokens, _ in work}) < 2:
        return None
    tokens, flops = zip(*work, strict=True)
    return power_law([tokens], flops)[0].value


def power_law(columns: Sequence[Sequence[float]], logs: Sequence[float]) -> list[Exponent]:
    """Return the exponents of a power law in some quantities, given as logarithms.

    The list is empty if the quantities varied together, because the fit is not unique then.
    """
    design = np.column_stack([np.ones(len(logs)), *columns])
    target = np.asarray(logs)
    solution, _, rank, _ = np.linalg.lstsq(design, target, rcond=None)
    degrees = len(logs) - design.shape[1]
    if rank < design.shape[1]:
        return []
    if degrees < 1:
        return [Exponent(float(x), None, None) for x in solution[1:]]
    variance = float(((design @ solution - target) ** 2).sum()) / degrees
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))[1:]
    spread = errors * stdtrit(degrees, 0.975)
    return [
        Exponent(float(x), float(x - s), float(x + s))
        for x, s in zip(solution[1:], spread, strict=True)
    ]
