"""Segments and dilation: time and maxima by configuration, and the cost of the curve."""

from collections.abc import Iterator, Mapping, Sequence

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Spread, Table, format_cell
from longseq_bench.reports.fields import time_with_interval
from longseq_bench.reports.groups import capitalize_first, group_by_workload
from longseq_bench.reports.sections.findings import limit_sentences

ALONG, CURVE = "dilated", "hilbert"
"""Implementations with the same segments and rates: along the sequence, and along the curve."""

_MAXIMA = (
    Column("Implementation"), Column("Segments"), Column("Dilation"), Column("Ranks", "count"),
    Column("Max tokens", "tokens"), Column("Limited by"), Column("Peak memory", "bytes"),
)  # fmt: skip
_SWEPT = (
    Column("Implementation"), Column("Segments"), Column("Dilation"), Column("Ranks", "count"),
    Column("Tokens", "tokens"), Column("Time", "seconds"), Column("Tokens/s", "count"),
    Column("Pairs seen", "share"), Column("Uncovered", "share"),
    Column("Speed of dilation", "ratio"), Column("Pairs without, times", "ratio"),
)  # fmt: skip
_CURVE = (
    Column("Segments"), Column("Dilation"), Column("Ranks", "count"), Column("Tokens", "tokens"),
    Column("Along the sequence", "seconds"), Column("Along the curve", "seconds"),
    Column("The curve takes", "ratio"),
)  # fmt: skip
_SAID = (
    "Speed of dilation: the time of the same segments with every rate 1 over the row's. Dilation "
    "also sees fewer pairs: beside it stands how many times as many pairs are seen without. Pairs "
    "seen is the share of the pairs that dense attention sees; uncovered the share of (token, "
    "head) pairs that see nothing."
)


def segments(source: Source) -> Section:
    """Build the section on maxima and times by segments and dilation, with dilation's effect."""
    rows = [row for row in source.rows if _segmented(row) and row.status == "ok"]
    found = [row for row in source.maxima if _segmented(row) and row.is_full_pass]
    tables = [*_maxima(source, found), *_swept(source, rows)]
    if not tables:
        return missing_section(
            "Segments and dilation", "attention with segments",
            "longseq sweep configs/hilbert.yaml",
            "longseq maxlen --impl dilated --impl hilbert -o segments=4096,8192 -o dilation=1,2",
        )  # fmt: skip
    points = limit_sentences(_effects(source, rows))
    return Section("Segments and dilation", [_SAID], points, tables)


def _segmented(row: Row) -> bool:
    return "segments" in row.options and "dilation" in row.options


def _maxima(source: Source, found: Sequence[SearchRow]) -> Iterator[Table]:
    for group in group_by_workload(found):
        rows = tuple(
            (
                row.implementation, *_configuration(row), row.world_size, row.max_tokens,
                row.limited_by, row.peak_bytes,
            )
            for row in group
        )  # fmt: skip
        yield Table(f"Longest lengths: {source.workload(group[0])}", _MAXIMA, rows)


def _swept(source: Source, swept: Sequence[SweepRow]) -> Iterator[Table]:
    for group in group_by_workload(swept):
        timed = _timed(group)
        rows = tuple(_cells(row, undilated(timed, row)) for row in group)
        where = source.workload(group[0])
        yield Table(capitalize_first(where), _SWEPT, rows)


def _cells(row: SweepRow, without: SweepRow | None) -> tuple[Cell, ...]:
    pairs = pairs_ratio(without, row) if without else None
    return (
        row.implementation, *_configuration(row), row.world_size, row.tokens,
        time_with_interval(row), row.tokens_per_s, row.token_density, row.uncovered,
        time_ratio(without, row) if without else None, pairs,
    )  # fmt: skip


def _configuration(row: Row) -> tuple[str, str]:
    return _list(row.options["segments"]), _list(row.options["dilation"])


def _list(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


Timed = dict[tuple[object, ...], SweepRow]


def _timed(rows: Sequence[SweepRow]) -> Timed:
    """Index timed rows by implementation, options and the other fields that a twin shares."""
    return {_named(row, row.implementation, row.options): row for row in rows if row.time_s}


def _named(row: SweepRow, implementation: str, options: Mapping[str, object]) -> tuple[object, ...]:
    same = row.tokens, row.world_size, row.keep, row.allocator
    return implementation, same, *sorted((name, _list(value)) for name, value in options.items())


def undilated(timed: Timed, row: SweepRow) -> SweepRow | None:
    """Return the timed twin with all rates 1; None if there is none or the rates are all 1."""
    rates = _rates(row)
    if not row.time_s or all(rate == 1 for rate in rates):
        return None
    options = {**row.options, "dilation": [1] * len(rates)}
    return timed.get(_named(row, row.implementation, options))


def _rates(row: SweepRow) -> list[int]:
    value = row.options["dilation"]
    return list(value) if isinstance(value, list | tuple) else [int(str(value))]


def time_ratio(over: SweepRow, under: SweepRow) -> Spread | float:
    """Return the ratio of two times, with the lowest and highest that both intervals allow."""
    value = require(over.time_s) / require(under.time_s)
    if min(over.samples, under.samples) < 2:
        return float(value)
    return Spread(
        value,
        require(over.time_low_s) / require(under.time_high_s),
        require(over.time_high_s) / require(under.time_low_s),
    )


def pairs_ratio(over: SweepRow, under: SweepRow) -> float | None:
    """Return the pairs seen by one row over those seen by another."""
    one, two = over.token_density, under.token_density
    return one / two if one is not None and two else None


def _effects(source: Source, rows: Sequence[SweepRow]) -> Iterator[str]:
    """Name the configuration with the highest speed-up by dilation, per workload."""
    for group in group_by_workload(rows):
        timed = _timed(group)
        pairs = [(row, without) for row in group if (without := undilated(timed, row))]
        where = source.workload(group[0])
        faster = [pair for pair in pairs if _least(*pair) > 1]
        if faster:
            yield _effect(
                *max(faster, key=lambda one: require(one[1].time_s) / require(one[0].time_s)), where
            )
        elif pairs:
            yield f"Dilation brings no speed that can be told ({where})."


def _least(row: SweepRow, without: SweepRow) -> float:
    """Return the lower bound of the speed ratio; 0 where one time is a single sample."""
    if min(row.samples, without.samples) < 2:
        return 0.0
    return float(require(without.time_low_s) / require(row.time_high_s))


def _effect(row: SweepRow, without: SweepRow, where: str) -> str:
    faster = require(without.time_s) / require(row.time_s)
    fewer, none = pairs_ratio(without, row), row.uncovered
    seen = f" and sees {format_cell(fewer, 'ratio')} fewer pairs" if fewer else ""
    bare = f", {format_share(none)} of (token, head) pairs see nothing" if none else ""
    return (
        f"Dilation brings most to {row.name} at {format_tokens(row.tokens)} tokens "
        f"({where}): it is {format_cell(faster, 'ratio')} as fast as with every rate 1{seen}{bare}."
    )


def curve(source: Source) -> Section:
    """Compare the same segments along the curve and along the sequence."""
    tables, points = [], []
    for group in group_by_workload(
        row for row in source.rows if _segmented(row) and row.status == "ok"
    ):
        timed = _timed(group)
        pairs = [
            (row, other)
            for row in timed.values()
            if row.implementation == ALONG
            if (other := timed.get(_named(row, CURVE, row.options)))
        ]
        if not pairs:
            continue
        where = source.workload(group[0])
        rows = tuple(_beside(row, other) for row, other in pairs)
        tables.append(Table(capitalize_first(where), _CURVE, rows))
        ratios = sorted(require(other.time_s) / require(row.time_s) for row, other in pairs)
        words = (format_cell(r, "ratio") for r in (ratios[0], ratios[-1]))
        ends = " to ".join(dict.fromkeys(words))
        points.append(f"The curve takes {ends} the time of the sequence ({where}).")
    if not tables:
        return missing_section(
            "Along the curve and along the sequence", "pair of the same segments along both",
            "longseq sweep configs/hilbert.yaml",
        )  # fmt: skip
    title = "Along the curve and along the sequence"
    return Section(title, points=limit_sentences(points), tables=tables)


def _beside(row: SweepRow, other: SweepRow) -> tuple[Cell, ...]:
    return (
        *_configuration(row), row.world_size, row.tokens, time_with_interval(row),
        time_with_interval(other), time_ratio(other, row),
    )  # fmt: skip
