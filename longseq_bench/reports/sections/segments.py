"""Segments and dilation: time and maxima by configuration, and the cost of the curve."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter

from longseq_bench.analysis.row import Row
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import ratio
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, time_ratio, time_with_interval
from longseq_bench.reports.document import Section, Spread
from longseq_bench.reports.groups import table_key
from longseq_bench.reports.sections import gains
from longseq_bench.reports.sections.gains import Reference

SWEEP_SEGMENTS = "longseq sweep configs/hilbert.yaml"
ALONG, CURVE = "dilated", "hilbert"
"""Implementations with the same segments and rates: along the sequence, and along the curve."""

_EXPLANATION = (
    "Speed of dilation: time of the same segments with every rate 1 divided by the row's time. "
    "Pairs without, times: pairs of those segments divided by the row's pairs.",
    "Pairs seen: share of the pairs of dense attention. Uncovered: share of the (token, head) "
    "pairs without any key.",
)


def segments(source: Source) -> Section:
    """Build the section on maxima and times by segments and dilation, with dilation's effect."""
    rows = [row for row in source.rows if _segmented(row) and row.status == "ok"]
    found = [row for row in source.maxima if _segmented(row) and row.is_full_pass]
    partners = _find_partners(rows, lambda row: _key(row, dilation=1))

    def speed(row: SweepRow) -> Spread | float | None:
        return time_ratio(partners[id(row)], row) if id(row) in partners else None

    columns: Columns = (
        *_CONFIGURATION, "tokens", "time_s", "tokens_per_s",
        ValueColumn("Pairs seen", "share", attrgetter("token_density")), "uncovered",
        ValueColumn("Speed of dilation", "ratio", speed),
        ValueColumn("Pairs without, times", "ratio", lambda row: _pairs_ratio(row, partners)),
    )  # fmt: skip
    undilated = Reference("every rate 1", speed)
    return Section(
        "Segments and dilation",
        _EXPLANATION,
        tables=[
            *gains.tables(source, rows, undilated, prefix="speed of dilation"),
            *source.tables(found, _MAXIMA, "longest lengths"),
            *source.tables(rows, columns),
        ],
        missing=(
            "attention with segments",
            SWEEP_SEGMENTS,
            "longseq maxlen --impl dilated --impl hilbert -o segments=4096,8192 -o dilation=1,2",
        ),
    )


def _segmented(row: Row) -> bool:
    return "segments" in row.options and "dilation" in row.options


def _as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _key(row: SweepRow, implementation: str = "", dilation: int | None = None) -> Hashable:
    """Return the key of a row, or of the same row with another implementation or dilation."""
    options: dict[str, object] = dict(row.options)
    if dilation is not None:
        options["dilation"] = [dilation] * len(_as_text(options["dilation"]).split(", "))
    same = table_key(row), row.tokens, row.world_size, row.keep, row.allocator
    named = sorted((name, _as_text(value)) for name, value in options.items())
    return implementation or row.implementation, same, *named


def _find_partners(
    rows: Iterable[SweepRow], partner_key: Callable[[SweepRow], Hashable]
) -> dict[int, SweepRow]:
    """Return the row that has the partner key of a row, by the id of the row; both were timed."""
    timed = {_key(row): row for row in rows if row.time_s}
    pairs = ((row, timed.get(partner_key(row), row)) for row in timed.values())
    return {id(row): partner for row, partner in pairs if partner is not row}


def _pairs_ratio(row: SweepRow, partners: Mapping[int, SweepRow]) -> float | None:
    """Return the pairs without dilation divided by the row's pairs."""
    return (
        ratio(partners[id(row)].token_density, row.token_density) if id(row) in partners else None
    )


def curve(source: Source) -> Section:
    """Compare the same segments along the curve and along the sequence."""
    rows = [row for row in source.rows if _segmented(row) and row.time_s]
    pairs = _find_partners(rows, lambda row: _key(row, CURVE))
    along = [row for row in rows if row.implementation == ALONG and id(row) in pairs]
    columns: Columns = (
        *_CONFIGURATION[1:], "tokens",
        ValueColumn("Along the sequence", "seconds", time_with_interval),
        ValueColumn("Along the curve", "seconds", lambda r: time_with_interval(pairs[id(r)])),
        ValueColumn("The curve takes", "ratio", lambda row: time_ratio(pairs[id(row)], row)),
    )  # fmt: skip
    title = "Along the curve and along the sequence"
    missing = "pair of trials with equal segments along the curve and the sequence", SWEEP_SEGMENTS
    return Section(title, tables=source.tables(along, columns), missing=missing)


_CONFIGURATION: Columns = (
    ValueColumn("Implementation", "text", attrgetter("implementation")),
    ValueColumn("Segments", "text", lambda row: _as_text(row.options["segments"])),
    ValueColumn("Dilation", "text", lambda row: _as_text(row.options["dilation"])), "world_size",
)  # fmt: skip
_MAXIMA: Columns = (*_CONFIGURATION, "max_tokens", "limited_by", "peak_bytes")
