"""What twice the tokens cost: ratios of times, beside the fitted exponent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_cell
from longseq_bench.reports.findings import first_said
from longseq_bench.reports.groups import capital, grouped, name_of, workload_words
from longseq_bench.reports.growth import exponent_words
from longseq_bench.reports.segments import ratio_of
from longseq_bench.reports.whole import wanting
from longseq_bench.scaling import Complexity, complexities
from longseq_bench.table import Row
from longseq_bench.units import format_tokens

_COLUMNS = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Twice", "tokens"),
    Column("Time is", "ratio"), Column("Exponent of tokens"), Column("By formula"),
)  # fmt: skip
_SAID = (
    "The time at twice the tokens over the time at the tokens; ± is the farther end of what the "
    "intervals of both leave possible. 2× is linear, 4× quadratic. The exponent is fitted to all "
    "lengths of the implementation, with its 95 % interval; by formula it is that of the FLOPs."
)


def doubling(source: Source) -> Section:
    """A table a workload of every pair of lengths of which one is twice the other."""
    tables, points = [], []
    for group in grouped(source.rows):
        fits = {one.label: one for one in complexities(group) if one.quantity == "time"}
        pairs = list(_pairs(group))
        if pairs:
            where = workload_words(group[0], source.machines)
            rows = tuple(_cells(*pair, fits.get(pair[0]["label"])) for pair in pairs)
            tables.append(Table(capital(where), _COLUMNS, rows))
            twice = {pair[0]["label"] for pair in pairs}
            told = [fit for fit in fits.values() if fit.tokens and fit.label in twice]
            points += [_said(fit, pairs, where) for fit in told]
    if not tables:
        return wanting(
            "Time a doubling", "length timed together with twice that length",
            "longseq sweep configs/quickstart.yaml",
        )  # fmt: skip
    return Section("Time a doubling", [_SAID], first_said(points), tables)


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    series: dict[tuple[str, int], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if row["time_s"]:
            series[row["label"], row["world_size"]][row["tokens"]] = row
    for by_length in series.values():
        for tokens in sorted(by_length):
            if 2 * tokens in by_length:
                yield by_length[tokens], by_length[2 * tokens]


def _cells(one: Row, two: Row, fit: Complexity | None) -> tuple[Cell, ...]:
    formula = None if fit is None or fit.formula_tokens is None else f"{fit.formula_tokens:z.2f}"
    return (
        name_of(one), one["tokens"], two["tokens"], ratio_of(two, one),
        exponent_words(fit.tokens) if fit else None, formula,
    )  # fmt: skip


def _said(fit: Complexity, pairs: Sequence[tuple[Row, Row]], where: str) -> str:
    ratios = [two["time_s"] / one["time_s"] for one, two in pairs if one["label"] == fit.label]
    ends = " to ".join(dict.fromkeys(format_cell(r, "ratio") for r in (min(ratios), max(ratios))))
    at = [one["tokens"] for one, _ in pairs if one["label"] == fit.label]
    span = f"from {format_tokens(min(at))} to {format_tokens(2 * max(at))} tokens"
    return (
        f"{fit.label} ({where}): twice the tokens take {ends} the time {span}; exponent "
        f"{exponent_words(fit.tokens)}."
    )
