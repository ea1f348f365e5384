"""Growth of maxima and times with tokens and ranks; minimum sparsities."""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import Complexity, Exponent, complexities, maxima_on_ranks
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import ratio
from longseq_bench.reports import maxima_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, build_table
from longseq_bench.reports.document import Section, Table
from longseq_bench.reports.groups import group_by_workload

_EXPLANATION = (
    "Exponents of a power law in tokens and ranks, fitted to the logarithms of median times and of "
    "peaks of a rank, with 95 % intervals. A dash: ranks did not vary, or varied with tokens.",
    "By formula: for time, of the FLOPs per rank; for memory, of the floor, or of the score matrix "
    "for dense. Ranks on a CPU share its cores, so more ranks may not be faster.",
)


def over_ranks(source: Source) -> Section:
    """Build a table per workload of longest lengths over ranks, with theory."""
    groups = [
        group
        for group in group_by_workload(source.maxima)
        if len({row.world_size for row in group}) > 1
    ]
    groups.sort(key=len, reverse=True)
    explanation = [
        "Theory: the tokens whose floor fits in the budgets of all ranks together. Expected: the "
        "maximum on one rank times the number of ranks, if memory limited both searches.",
        "Times as long: the maximum divided by that on one rank.",
    ]
    return Section(
        "Longest lengths over ranks",
        explanation,
        tables=[_over_ranks_table(source, group) for group in groups],
        charts=maxima_charts.over_ranks(source),
    )


def _over_ranks_table(source: Source, maxima: Sequence[SearchRow]) -> Table:
    """Return the table of longest lengths of one workload over ranks, the farthest series first."""
    series = group_by(maxima_on_ranks(maxima), attrgetter("label")).values()
    ordered = sorted(series, key=lambda some: -max(one.actual for one in some))
    one_rank = {row.label: row.max_tokens for row in maxima if row.world_size == 1}
    times = ValueColumn(
        "Times as long", "ratio", lambda one: ratio(one.actual, one_rank.get(one.label))
    )
    columns = (*_OVER_RANKS, times, ValueColumn("Limited by", "text", attrgetter("limited_by")))
    scaled = [one for some in ordered for one in some]
    return build_table(source.title(maxima[0]), columns, scaled, keep_empty=True)


def find_fits(source: Source) -> list[tuple[list[SweepRow], list[Complexity]]]:
    """Return the rows and fits of each workload, that with the fit of most points first."""
    groups = group_by_workload(source.rows)
    found = [(group, fits) for group in groups if (fits := complexities(group))]
    return sorted(found, key=lambda one: (-max(fit.points for fit in one[1]), -len(one[1])))


def find_best_fit(rows: Sequence[SweepRow], fits: Sequence[Complexity]) -> Complexity | None:
    """Return the fit of time of most points: of exact attention, with the narrowest interval."""
    sparse = {row.label for row in rows if row.is_sparse}

    def rank(fit: Complexity) -> tuple[int, bool, float]:
        one, width = fit.tokens, math.inf
        if one and one.low is not None and one.high is not None:
            width = one.high - one.low
        return -fit.points, fit.label in sparse, width

    known = (fit for fit in fits if fit.quantity == "time" and fit.tokens)
    return min(known, key=rank, default=None)


def exponents(source: Source) -> Section:
    """Build a table of fitted exponents per workload."""
    tables = [
        build_table(source.title(group[0]), _EXPONENTS, fits, keep_empty=True)
        for group, fits in find_fits(source)
    ]
    return Section("How time and memory grow", _EXPLANATION, tables=tables)


def format_formula(value: float | None) -> str | None:
    """Return an exponent by formula as text."""
    return None if value is None else f"{value:z.2f}"


def format_exponent(one: Exponent | None) -> str | None:
    """Return a fitted exponent with its interval as text."""
    if one is None:
        return None
    if one.low is None or one.high is None:
        return format_formula(one.value)
    return f"{one.value:z.2f} ({one.low:z.2f} to {one.high:z.2f})"


def minimum_sparsity(source: Source) -> Section:
    """Build a table per workload of the searches for the minimum sparsity."""
    explanation = (
        "Minimum sparsity: the lowest that passed at that length: most of its runs met the time "
        "limit, and none failed for another reason. Highest failed sparsity: below the minimum."
    )
    tables = source.tables(source.minima, _SPARSITIES)
    return Section("Minimum sparsity", [explanation], tables=tables)


def format_sparsity(value: float | None, rounded: Callable[[float], int]) -> str | None:
    """Return a sparsity with five digits.  rounded: math.ceil if it passed, floor if it failed."""
    return None if value is None else f"{rounded(value * 1e5) / 1e5:.5f}"


_OVER_RANKS = (
    ValueColumn("Implementation", "text", attrgetter("label")),
    ValueColumn("Ranks", "count", attrgetter("world_size")),
    ValueColumn("Theory", "tokens", attrgetter("theory")),
    ValueColumn("Expected", "tokens", attrgetter("expected")),
    ValueColumn("Found", "tokens", attrgetter("actual")),
    ValueColumn("Of expected", "share", lambda one: one.expected and one.actual / one.expected),
)
_EXPONENTS = (
    ValueColumn("Implementation", "text", attrgetter("label")),
    ValueColumn("Of", "text", attrgetter("quantity")),
    ValueColumn("Tokens ^", "text", lambda one: format_exponent(one.tokens)),
    ValueColumn("By formula", "text", lambda one: format_formula(one.formula_tokens)),
    ValueColumn("Ranks ^", "text", lambda one: format_exponent(one.ranks)),
    ValueColumn("By formula", "text", lambda one: format_formula(one.formula_ranks)),
    ValueColumn("Points", "count", attrgetter("points")),
)
_SPARSITIES: Columns = (
    "label", "world_size", "tokens",
    # rounded so that what is shown passed, or failed, as well
    ValueColumn(
        "Minimum sparsity", "text", lambda r: format_sparsity(r.least_sparsity, math.ceil)
    ),
    ValueColumn(
        "Highest failed sparsity", "text", lambda r: format_sparsity(r.too_dense, math.floor)
    ),
    "limited_by", "time_s", "peak_bytes", "confirmations", "runs",
)  # fmt: skip
