"""Growth of maxima and times with tokens and ranks; least sparsities."""

import math
from collections.abc import Iterator

from longseq_bench.analysis.scaling import Exponent, complexities, reached
from longseq_bench.analysis.searches import density_rows
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Column, Section, Table
from longseq_bench.reports.fields import computed, rows_table
from longseq_bench.reports.groups import group_by_workload

_REACHED = (
    Column("Implementation"), Column("Ranks", "count"), Column("Theory", "tokens"),
    Column("Expected", "tokens"), Column("Found", "tokens"), Column("Of expected", "share"),
    Column("Limited by"),
)  # fmt: skip
_COMPLEXITY = (
    Column("Implementation"), Column("Of"), Column("Tokens ^"), Column("By formula"),
    Column("Ranks ^"), Column("By formula"), Column("Points", "count"),
)  # fmt: skip
_SPARSITIES = (
    "label", "world_size", "tokens",
    computed("Least sparsity", "text", lambda row: format_sparsity_up(row.least_sparsity)),
    computed("Too dense", "text", lambda row: format_sparsity_down(row.too_dense)),
    "limited_by", "time_s", "peak_bytes", "confirmations", "runs",
)  # fmt: skip


def growth(source: Source) -> Iterator[Section]:
    """Build two sections: longest lengths over ranks, and fitted exponents."""
    tables = []
    for group in group_by_workload(source.maxima):
        if len({row.world_size for row in group}) > 1:
            rows = tuple(
                (
                    one.label, one.world_size, one.theory, one.expected, one.actual,
                    one.actual / one.expected if one.expected else None, one.limited_by,
                )
                for one in reached(group)
            )  # fmt: skip
            tables.append(Table(source.title(group[0]), _REACHED, rows))
    said = (
        "Theory: the tokens whose floor fits in the budgets of all ranks together. Expected: the "
        "maximum on one rank times the ranks, where memory limited both."
    )
    pictures = section_charts.over_ranks(source)
    yield Section("Longest lengths over ranks", [said], tables=tables, charts=pictures)
    yield Section("How time and memory grow", [_FITTED], tables=list(_fits(source)))


_FITTED = (
    "Exponents of a power law in tokens and ranks, fitted in logarithms to the medians of time and "
    "to the peaks of a rank, with 95 % intervals, as if what is left over were noise. By formula: "
    "time, of the FLOPs stated, shared by the ranks; memory, of the floor, of dense its scores. "
    "Ranks of a CPU share its cores, so their time need not shrink. A dash where tokens and ranks "
    "went together."
)


def _fits(source: Source) -> Iterator[Table]:
    for group in group_by_workload(source.rows):
        rows = tuple(
            (
                one.label, one.quantity, format_exponent(one.tokens), _formula(one.formula_tokens),
                format_exponent(one.ranks), _formula(one.formula_ranks), one.points,
            )
            for one in complexities(group)
        )  # fmt: skip
        if rows:
            yield Table(source.title(group[0]), _COMPLEXITY, rows)


def _formula(value: float | None) -> str | None:
    return None if value is None else f"{value:z.2f}"


def format_exponent(one: Exponent | None) -> str | None:
    """A fitted exponent with its interval."""
    if one is None:
        return None
    if one.low is None or one.high is None:
        return f"{one.value:z.2f}"
    return f"{one.value:z.2f} ({one.low:z.2f} to {one.high:z.2f})"


def least_sparse(source: Source) -> Section:
    """The searches for the least sparsity."""
    groups = group_by_workload(density_rows(source.records))
    tables = [rows_table(group, source, _SPARSITIES) for group in groups]
    said = (
        "Least sparsity is the least that passed at that length: most of its runs were in time and "
        "none failed otherwise. Too dense is the largest that failed below it."
    )
    return Section("Least sparsities", [said], tables=tables)


def format_sparsity_up(value: float | None) -> str | None:
    """A sparsity that passed, rounded up: one below it may have failed."""
    return None if value is None else f"{math.ceil(value * 1e5) / 1e5:.5f}"


def format_sparsity_down(value: float | None) -> str | None:
    """A sparsity that failed, rounded down."""
    return None if value is None else f"{math.floor(value * 1e5) / 1e5:.5f}"
