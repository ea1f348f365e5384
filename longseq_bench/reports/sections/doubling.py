"""Cost of doubling the tokens: ratios of times, and the fitted exponent."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from longseq_bench.analysis.row import require
from longseq_bench.analysis.scaling import Complexity, Exponent, complexities
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_cell
from longseq_bench.reports.groups import capitalize_first, group_by_workload
from longseq_bench.reports.sections.findings import limit_sentences
from longseq_bench.reports.sections.growth import format_exponent
from longseq_bench.reports.sections.segments import time_ratio

_COLUMNS = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Twice", "tokens"),
    Column("Time is", "ratio"), Column("Which is"), Column("Exponent of tokens"),
    Column("By formula"),
)  # fmt: skip
_SAID = (
    "The time at twice the tokens over the time at the tokens; ± is the farther end of what the "
    "intervals of both leave possible. 2× is linear, 4× quadratic. The exponent is fitted to all "
    "lengths of the implementation, with its 95 % interval; by formula it is that of the FLOPs. "
    "Where no length was timed together with its double, the time is fitted: 2 to the power of the "
    "exponent, if the longest length is at least twice the shortest."
)
_MOST = 1000.0
"""Limit of the exponent, so that 2 to its power is finite."""


def doubling(source: Source) -> Section:
    """Build a table per workload of the lengths that were timed together with their double.

    The fitted exponent replaces the ratio where no such pair was timed.
    """
    tables, points = [], []
    for group in group_by_workload(source.rows):
        fits = {one.label: one for one in complexities(group) if one.quantity == "time"}
        pairs = list(_pairs(group))
        twice = {pair[0].label for pair in pairs}
        told = [fit for fit in fits.values() if fit.tokens and fit.label in twice]
        lengths = _lengths(group)
        fitted = [
            (fit.label, exponent, min(lengths[fit.label]), max(lengths[fit.label]))
            for fit in fits.values()
            if (exponent := fit.tokens) and fit.label not in twice
            if max(lengths[fit.label]) >= 2 * min(lengths[fit.label])
        ]
        if pairs or fitted:
            where = source.workload(group[0])
            rows = [_cells(*pair, fits.get(pair[0].label)) for pair in pairs]
            rows += [_fitted(exponent, fits[label]) for label, exponent, *_ in fitted]
            tables.append(Table(capitalize_first(where), _COLUMNS, tuple(rows)))
            points += [_said(fit, pairs, where) for fit in told]
            points += [_said_by_fit(*one, where) for one in fitted]
    if not tables:
        return missing_section(
            "Time a doubling", "length timed together with twice that length",
            "longseq sweep configs/quickstart.yaml",
        )  # fmt: skip
    return Section("Time a doubling", [_SAID], limit_sentences(points), tables)


def _pairs(rows: Sequence[SweepRow]) -> Iterator[tuple[SweepRow, SweepRow]]:
    series: dict[tuple[str, int], dict[int, SweepRow]] = defaultdict(dict)
    for row in rows:
        if row.time_s:
            series[row.label, row.world_size][row.tokens] = row
    for by_length in series.values():
        for tokens in sorted(by_length):
            if 2 * tokens in by_length:
                yield by_length[tokens], by_length[2 * tokens]


def _lengths(rows: Sequence[SweepRow]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.status == "ok" and row.time_s:
            found[row.label].append(row.tokens)
    return found


def _cells(one: SweepRow, two: SweepRow, fit: Complexity | None) -> tuple[Cell, ...]:
    return (
        one.name, one.tokens, two.tokens, time_ratio(two, one), "measured",
        format_exponent(fit.tokens) if fit else None, _formula(fit),
    )  # fmt: skip


def _fitted(exponent: Exponent, fit: Complexity) -> tuple[Cell, ...]:
    times = _times(exponent)
    return (fit.label, None, None, times, "fitted", format_exponent(exponent), _formula(fit))


def _times(exponent: Exponent) -> float:
    """Return the time at twice the tokens by a power law."""
    return float(2.0 ** min(exponent.value, _MOST))


def _formula(fit: Complexity | None) -> str | None:
    return None if fit is None or fit.formula_tokens is None else f"{fit.formula_tokens:z.2f}"


def _said(fit: Complexity, pairs: Sequence[tuple[SweepRow, SweepRow]], where: str) -> str:
    own = [(one, two) for one, two in pairs if one.label == fit.label]
    ratios = [require(two.time_s) / require(one.time_s) for one, two in own]
    ends = " to ".join(dict.fromkeys(format_cell(r, "ratio") for r in (min(ratios), max(ratios))))
    at = [one.tokens for one, _ in own]
    span = f"from {format_tokens(min(at))} to {format_tokens(2 * max(at))} tokens"
    return (
        f"{fit.label} ({where}): twice the tokens take {ends} the time {span}; exponent "
        f"{format_exponent(fit.tokens)}."
    )


def _said_by_fit(label: str, exponent: Exponent, first: int, last: int, where: str) -> str:
    span = f"from {format_tokens(first)} to {format_tokens(last)} tokens"
    return (
        f"{label} ({where}): no length was timed together with its double; fitted {span}, twice "
        f"the tokens take {format_cell(_times(exponent), 'ratio')} the time; exponent "
        f"{format_exponent(exponent)}."
    )
