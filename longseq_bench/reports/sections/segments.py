"""Segments and dilation: time and maxima by configuration, and the cost of the curve."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import ratio
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, time_ratio, time_with_interval
from longseq_bench.reports.document import Section, Spread, format_ratio
from longseq_bench.reports.groups import table_key
from longseq_bench.reports.wording import format_range

SWEEP_SEGMENTS = "longseq sweep configs/hilbert.yaml"
ALONG, CURVE = "dilated", "hilbert"
"""Implementations with the same segments and rates: along the sequence, and along the curve."""

_ABOUT = (
    "Speed of dilation: time of the same segments with every rate 1 over the row's; pairs without: "
    "how many times as many pairs they see. Pairs seen: the share of dense attention's pairs; "
    "uncovered: the share of (token, head) pairs that see nothing."
)


def segments(source: Source) -> Section:
    """Build the section on maxima and times by segments and dilation, with dilation's effect."""
    rows = [row for row in source.rows if _segmented(row) and row.status == "ok"]
    found = [row for row in source.maxima if _segmented(row) and row.is_full_pass]
    twins = _twins(rows, lambda row: _key(row, dilation=1))

    def speed(row: SweepRow) -> Spread | float | None:
        return time_ratio(twins[id(row)], row) if id(row) in twins else None

    columns: Columns = (
        *_CONFIGURATION, "tokens", "time_s", "tokens_per_s",
        ValueColumn("Pairs seen", "share", attrgetter("token_density")), "uncovered",
        ValueColumn("Speed of dilation", "ratio", speed),
        ValueColumn("Pairs without, times", "ratio", lambda row: _more_pairs(row, twins)),
    )  # fmt: skip
    effects = (_effect(group, twins, where) for where, group in source.workloads(rows))
    maxima = source.tables(found, _MAXIMA, "longest lengths: ")
    return Section(
        "Segments and dilation",
        [_ABOUT],
        list(filter(None, effects)),
        [*maxima, *source.tables(rows, columns)],
        missing=(
            "attention with segments",
            SWEEP_SEGMENTS,
            "longseq maxlen --impl dilated --impl hilbert -o segments=4096,8192 -o dilation=1,2",
        ),
    )


def _segmented(row: Row) -> bool:
    return "segments" in row.options and "dilation" in row.options


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _key(row: SweepRow, implementation: str = "", dilation: int | None = None) -> Hashable:
    """Return a key of a row, or of its twin with another implementation or one rate for all."""
    options: dict[str, object] = dict(row.options)
    if dilation is not None:
        options["dilation"] = [dilation] * len(_text(options["dilation"]).split(", "))
    same = table_key(row), row.tokens, row.world_size, row.keep, row.allocator
    named = sorted((name, _text(value)) for name, value in options.items())
    return implementation or row.implementation, same, *named


def _twins(
    rows: Iterable[SweepRow], twin_key: Callable[[SweepRow], Hashable]
) -> dict[int, SweepRow]:
    """Return the other row that has the twin's key, by the id of the row; both were timed."""
    timed = {_key(row): row for row in rows if row.time_s}
    pairs = ((row, timed.get(twin_key(row), row)) for row in timed.values())
    return {id(row): twin for row, twin in pairs if twin is not row}


def _more_pairs(row: SweepRow, twins: Mapping[int, SweepRow]) -> float | None:
    """Return the pairs seen without dilation over those seen."""
    return ratio(twins[id(row)].token_density, row.token_density) if id(row) in twins else None


def _effect(group: list[SweepRow], twins: Mapping[int, SweepRow], where: str) -> str | None:
    """Name the configuration with the highest speed-up by dilation."""
    speeds = [(time_ratio(twins[id(row)], row), row) for row in group if id(row) in twins]
    # a single sample has no bound
    sure = [(s.value, row) for s, row in speeds if isinstance(s, Spread) and s.low > 1]
    if not sure:
        return f"Dilation brings no speed that can be told ({where})." if speeds else None
    faster, row = max(sure, key=lambda pair: pair[0])
    fewer, bare = _more_pairs(row, twins), row.uncovered
    seen = f" and sees {format_ratio(fewer)} fewer pairs" if fewer else ""
    unseen = f", {format_share(bare)} of (token, head) pairs see nothing" if bare else ""
    return (
        f"Dilation brings most to {row.name} at {format_tokens(row.tokens)} tokens ({where}): it "
        f"is {format_ratio(faster)} as fast as with every rate 1{seen}{unseen}."
    )


def curve(source: Source) -> Section:
    """Compare the same segments along the curve and along the sequence."""
    rows = [row for row in source.rows if _segmented(row) and row.time_s]
    pairs = _twins(rows, lambda row: _key(row, CURVE))
    along = [row for row in rows if row.implementation == ALONG and id(row) in pairs]
    columns: Columns = (
        *_CONFIGURATION[1:], "tokens",
        ValueColumn("Along the sequence", "seconds", time_with_interval),
        ValueColumn("Along the curve", "seconds", lambda r: time_with_interval(pairs[id(r)])),
        ValueColumn("The curve takes", "ratio", lambda row: time_ratio(pairs[id(row)], row)),
    )  # fmt: skip
    points = []
    for where, group in source.workloads(along):
        ratios = [require(pairs[id(row)].time_s) / require(row.time_s) for row in group]
        ends = format_range(ratios, format_ratio)
        points.append(f"The curve takes {ends} the time of the sequence ({where}).")
    title = "Along the curve and along the sequence"
    missing = "pair of the same segments along both", SWEEP_SEGMENTS
    return Section(title, points=points, tables=source.tables(along, columns), missing=missing)


_CONFIGURATION: Columns = (
    ValueColumn("Implementation", "text", attrgetter("implementation")),
    ValueColumn("Segments", "text", lambda row: _text(row.options["segments"])),
    ValueColumn("Dilation", "text", lambda row: _text(row.options["dilation"])), "world_size",
)  # fmt: skip
_MAXIMA: Columns = (*_CONFIGURATION, "max_tokens", "limited_by", "peak_bytes")
