"""Longest lengths: one table per workload, one row per search."""

from collections.abc import Iterator
from functools import partial

from longseq_bench.analysis.row import require
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.core.hardware import Hardware, profiles
from longseq_bench.core.units import format_bytes
from longseq_bench.reports import maxima_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import MIN_PEAK, Columns, ValueColumn, optional
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import has_several_ranks


def maxima(source: Source) -> Section:
    """Build a table of all searches per workload, and bar charts."""
    return Section(
        "Longest lengths",
        list(_explain(source)),
        tables=source.tables(source.maxima, _MAXIMA),
        charts=maxima_charts.by_limit(source),
    )


def _explain(source: Source) -> Iterator[str]:
    """Explain the columns, and the settings that make maxima not comparable."""
    rows = source.maxima
    yield (
        "Max tokens: the longest length that passed: most of its runs met the time limit, and "
        "none failed for another reason. First failure: the shortest failed length above it."
    )
    yield (
        "Fraction of floor: the bytes that any exact attention needs at Max tokens, divided by "
        "the budget. Confirmations: further passes in fresh processes."
    )
    if has_several_ranks(rows):
        yield (
            "With several ranks: Max tokens and the floor are those of all ranks together; Tokens "
            "per rank and Peak memory are the largest of any rank."
        )
    if any(row.fit_only for row in rows):
        yield (
            "Fit only, and Fits in memory: loops were shortened, under the same memory budget. "
            "Outputs and times were not checked."
        )
    if any(row.keep == "inputs" for row in rows):
        yield "Recomputed: only q, k and v are kept between forward and backward."
    if any(row.keep == "nothing" for row in rows):
        yield "In place: outputs overwrite inputs; the floor counts both."
    if any(row.offloads for row in rows):
        yield (
            "Offloaded: q, k, v and the output are in the host's memory, so the device's budget "
            "and the floor do not limit their length."
        )


_MAXIMA: Columns = (
    "label", "world_size", *optional(SearchRow, "density_achieved"), "max_tokens",
    *optional(SearchRow, "fits_tokens"), "tokens_per_rank",
    "first_failure", "limited_by", "failure_phase", "floor_tokens", "fraction_of_floor",
    "peak_bytes", MIN_PEAK, "imbalance", "bytes_per_token", "predicted_tokens", "runs",
    "confirmations",
)  # fmt: skip


# ---- lengths on other hardware, computed from the bytes per token here ---------------------------

_PROJECTED = (
    "Computed, not measured: the memory of one device divided by the bytes per token of a search "
    "on one rank that memory limited. It assumes the same bytes per token on that hardware and "
    "ignores time and kernel limits; longseq plan predicts these too."
)


def projected(source: Source) -> Section:
    """Build a table per workload of maxima that memory limits, with a column per profile."""
    known = [
        row
        for row in source.maxima
        if row.world_size == 1 and row.limited_by == "memory" and row.bytes_per_token
        if row.is_full_pass and not row.offloads
    ]
    others = [
        ValueColumn(f"{one.name}, {format_bytes(one.memory)}", "tokens", partial(_tokens, one))
        for one in profiles().values()
    ]
    columns: Columns = ("label", "bytes_per_token", *others)
    tables = source.tables(known, columns)
    return Section("On other hardware, computed", [_PROJECTED], tables=tables)


def _tokens(hardware: Hardware, row: SearchRow) -> int:
    return int(hardware.memory / require(row.bytes_per_token))
