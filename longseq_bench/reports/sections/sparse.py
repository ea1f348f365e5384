"""Sparse attention, segments and dilation: the skipped share of the pairs, and the time saved."""

from collections.abc import Hashable
from operator import attrgetter

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.cost import ratio
from longseq_bench.core.units import format_share
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, optional, time_ratio
from longseq_bench.reports.document import Section, Spread
from longseq_bench.reports.groups import table_key
from longseq_bench.reports.sections import gains


def sparse(source: Source) -> Section:
    """Build a table per workload of the sparse rows, and a map of their speeds over dense."""
    rows = [row for row in source.rows if row.is_sparse]
    return Section(
        "Sparse and dilated attention",
        tables=source.tables(rows, _SPARSE),
        charts=charts.speed_over_dense(source, source.rows),
    )


def _share_words(row: SweepRow) -> str | None:
    """Return the share of ideal, with its bounds if they are known."""
    if row.share_of_ideal is None:
        return None
    share = format_share(row.share_of_ideal)
    if row.share_low is None:
        return share
    return f"{share} ({format_share(row.share_low)} to {format_share(require(row.share_high))})"


_SPARSE: Columns = (
    ValueColumn("Implementation", "text", attrgetter("name")), "tokens", "token_density",
    "plan_time_s", "time_s", "dense_time_s", "dense_source", "dense_kernel", "speed_over_dense",
    ValueColumn("Share of ideal", "text", _share_words), *optional(SweepRow, "share_of_peak"),
)  # fmt: skip


# ---- segments and dilation -----------------------------------------------------------------------

ALONG, CURVE = "dilated", "hilbert"
"""Implementations with the same segments and rates: along the sequence, and along the curve."""


def segments(source: Source) -> Section:
    """Build tables of times by segments and dilation, with the effects of dilation and curve."""
    rows = [row for row in source.rows if _is_segmented(row) and row.status == "ok"]
    found = [row for row in source.maxima if _is_segmented(row) and row.is_full_pass]
    timed = {_key(row): row for row in rows if row.time_s}

    def undilated(row: SweepRow) -> SweepRow | None:
        partner = timed.get(_key(row, dilation=1))
        return None if partner is row else partner

    def pairs_ratio(row: SweepRow) -> float | None:
        partner = undilated(row)
        return ratio(partner.token_density, row.token_density) if partner else None

    def over_undilated(row: SweepRow) -> Spread | float | None:
        partner = undilated(row)
        return time_ratio(partner, row) if partner and row.time_s else None

    def over_sequence(row: SweepRow) -> Spread | float | None:
        partner = timed.get(_key(row, ALONG)) if row.implementation == CURVE else None
        return time_ratio(partner, row) if partner and row.time_s else None

    columns: Columns = (
        *_CONFIGURATION, "tokens", "time_s", "tokens_per_s",
        ValueColumn("Pairs seen", "share", attrgetter("token_density")), "uncovered",
        ValueColumn("Speed of dilation", "ratio", over_undilated, optional=True),
        ValueColumn("Pairs without, times", "ratio", pairs_ratio, optional=True),
        ValueColumn("Speed of the curve", "ratio", over_sequence, optional=True),
    )  # fmt: skip
    references = {"every rate 1": over_undilated, "sequence": over_sequence}
    return Section(
        "Segments and dilation",
        tables=[
            *gains.tables(source, rows, references),
            *source.tables(found, _SEGMENTED_MAXIMA, "longest lengths"),
            *source.tables(rows, columns),
        ],
    )


def _is_segmented(row: Row) -> bool:
    return "segments" in row.options and "dilation" in row.options


def _key(row: SweepRow, implementation: str = "", dilation: int | None = None) -> Hashable:
    """Return the key of a row, or of the same row with another implementation or dilation."""
    options = {name: _as_text(value) for name, value in row.options.items()}
    if dilation is not None:
        options["dilation"] = ", ".join([str(dilation)] * len(options["dilation"].split(", ")))
    same = table_key(row), row.tokens, row.world_size, row.keep, row.allocator
    return implementation or row.implementation, same, *sorted(options.items())


def _as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


_CONFIGURATION: Columns = (
    "label", ValueColumn("Segments", "text", lambda row: _as_text(row.options["segments"])),
    ValueColumn("Dilation", "text", lambda row: _as_text(row.options["dilation"])), "world_size",
)  # fmt: skip
_SEGMENTED_MAXIMA: Columns = (*_CONFIGURATION, "max_tokens", "limited_by", "peak_bytes")
