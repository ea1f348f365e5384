"""How maxima and times grow with tokens and ranks; the least sparsity with which a length fits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from longseq_bench.analysis.scaling import Exponent, complexities, reached
from longseq_bench.analysis.searches import density_rows
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Column, Section, Table
from longseq_bench.reports.groups import capital, grouped, workload_words

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
    Column("Implementation"), Column("Ranks", "count"), Column("Tokens", "tokens"),
    Column("Least sparsity"), Column("Too dense"), Column("Limited by"), Column("Time", "seconds"),
    Column("Peak memory", "bytes"), Column("Confirmations", "count"), Column("Runs", "count"),
)  # fmt: skip


def growth(source: Source) -> Iterator[Section]:
    """Where maxima were searched on several numbers of ranks, and where times of three lengths or
    more are known."""
    tables = []
    for group in grouped(source.maxima):
        if len({row.world_size for row in group}) > 1:
            rows = tuple(
                (
                    one.label, one.world_size, one.theory, one.expected, one.actual,
                    one.actual / one.expected if one.expected else None, one.limited_by,
                )
                for one in reached(group)
            )  # fmt: skip
            tables.append(Table(capital(workload_words(group[0], source.machines)), _REACHED, rows))
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
    for group in grouped(source.rows):
        rows = tuple(
            (
                one.label, one.quantity, exponent_words(one.tokens), _formula(one.formula_tokens),
                exponent_words(one.ranks), _formula(one.formula_ranks), one.points,
            )
            for one in complexities(group)
        )  # fmt: skip
        if rows:
            yield Table(capital(workload_words(group[0], source.machines)), _COMPLEXITY, rows)


def _formula(value: float | None) -> str | None:
    return None if value is None else f"{value:z.2f}"


def exponent_words(one: Exponent | None) -> str | None:
    """A fitted exponent with its interval."""
    if one is None:
        return None
    if one.low is None or one.high is None:
        return f"{one.value:z.2f}"
    return f"{one.value:z.2f} ({one.low:z.2f} to {one.high:z.2f})"


def least_sparse(source: Source) -> Section:
    """The searches for the least sparsity."""
    rows = density_rows(source.records)
    tables = [
        Table(
            capital(workload_words(group[0], source.machines)),
            _SPARSITIES,
            tuple(
                (
                    row.label, row.world_size, row.tokens,
                    least_words(row.least_sparsity), dense_words(row.too_dense),
                    row.limited_by, row.time_s,
                    row.peak_bytes, row.confirmations, row.runs,
                )
                for row in group
            ),
        )
        for group in grouped(rows)
    ]  # fmt: skip
    said = (
        "Least sparsity is the least of which every run at that length passed, too dense the "
        "largest that failed below it."
    )
    return Section("Least sparsities", [said], tables=tables)


def least_words(value: float | None) -> str | None:
    """A sparsity that passed, rounded up: one below it may have failed."""
    return None if value is None else f"{math.ceil(value * 1e5) / 1e5:.5f}"


def dense_words(value: float | None) -> str | None:
    """A sparsity that failed, rounded down."""
    return None if value is None else f"{math.floor(value * 1e5) / 1e5:.5f}"
