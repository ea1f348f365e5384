"""Cost of doubling the tokens: ratios of times, and the fitted exponent."""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.scaling import Complexity, complexities
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import SWEEP, Source
from longseq_bench.reports.columns import time_ratio
from longseq_bench.reports.document import Cell, Column, Section, Table
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.growth import format_exponent, format_formula

_COLUMNS = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Twice", "tokens"),
    Column("Time is", "ratio"), Column("Which is"), Column("Exponent of tokens"),
    Column("By formula"),
)  # fmt: skip
_EXPLANATION = (
    "Time at 2N tokens divided by the time at N tokens, with the bounds that both intervals allow. "
    "2× is linear, 4× quadratic.",
    "Exponent: fitted to all lengths, with its 95 % interval; by formula: of the FLOPs. Fitted: 2 "
    "to the power of the exponent, where no two timed lengths differ by a factor of two.",
)
_MAX_EXPONENT = 1000.0
"""Limit of the exponent, to keep 2 to its power finite."""


def doubling(source: Source) -> Section:
    """Build a table per workload of the timed lengths N for which 2N was timed too.

    The fitted exponent replaces the ratio where no such pair was timed.
    """
    tables = []
    for group in group_by_workload(source.rows):
        pairs = list(_pairs(group))
        fits = {one.label: one for one in complexities(group) if one.quantity == "time"}
        rows: list[tuple[Cell, ...]] = [
            (
                one.name, one.tokens, two.tokens, time_ratio(two, one), "measured",
                *_exponents(fits.get(one.label)),
            )
            for one, two in pairs
        ]  # fmt: skip
        paired = {one.label for one, _ in pairs}
        for fit in fits.values():
            lengths = [row.tokens for row in group if row.label == fit.label and row.time_s]
            if fit.label in paired or fit.tokens is None or max(lengths) < 2 * min(lengths):
                continue
            times = 2.0 ** min(fit.tokens.value, _MAX_EXPONENT)
            rows.append((fit.label, None, None, times, "fitted", *_exponents(fit)))
        if rows:
            tables.append(Table(source.title(group[0]), _COLUMNS, tuple(rows)))
    missing = "pair of timed lengths that differ by a factor of two", SWEEP
    return Section("Time a doubling", _EXPLANATION, tables=tables, missing=missing)


def _pairs(rows: Sequence[SweepRow]) -> Iterator[tuple[SweepRow, SweepRow]]:
    timed = [row for row in rows if row.time_s]
    for series in group_by(timed, attrgetter("label", "world_size")).values():
        by_length = {row.tokens: row for row in series}
        for tokens in sorted(by_length):
            if 2 * tokens in by_length:
                yield by_length[tokens], by_length[2 * tokens]


def _exponents(fit: Complexity | None) -> tuple[Cell, Cell]:
    if fit is None:
        return None, None
    return format_exponent(fit.tokens), format_formula(fit.formula_tokens)
