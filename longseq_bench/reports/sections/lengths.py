"""Swept lengths, one row per trial, and longest lengths, one row per search, per workload."""

from dataclasses import replace
from functools import partial

from longseq_bench.analysis.row import require
from longseq_bench.analysis.scaling import explain_high_efficiency
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.hardware import Hardware, profiles
from longseq_bench.core.units import format_bytes
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, field_column, optional
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import has_several_ranks, split_names


def _of_standard(name: str) -> ValueColumn:
    """Return a column about standard attention, empty in rows that are not compared with it."""
    return replace(
        field_column(SweepRow, name),
        value=lambda row: None if row.memory_reduction is None else getattr(row, name),
        optional=True,
    )


_LENGTHS: Columns = (
    *split_names("label tokens world_size tokens_per_rank status time_s samples"),
    *optional(SweepRow, "unstable"),
    *split_names("compute_time_s communication_time_s exposed_share speedup efficiency"),
    *split_names("bytes_sent peak_bytes imbalance tokens_per_s effective_flops max_error"),
    *optional(SweepRow, "share_of_bandwidth", "copy_bandwidth", "memory_reduction"),
    *(_of_standard(name) for name in ("dense_peak_bytes", "dense_memory_source")),
    *optional(SweepRow, "wire_error", "density_asked", "density_achieved"),
    ValueColumn("Uncovered", "share", lambda row: row.uncovered or None, optional=True),
    ValueColumn("Zero rows", "share", lambda row: row.zero_rows or None, optional=True),
    *optional(SweepRow, "speed"),
)


def lengths(source: Source) -> Section:
    """Build a table and charts of all measured rows, per workload."""
    explanation = ["A dash: not measured; see Failures.", *explain_high_efficiency(source.rows)]
    if source.baseline_label:
        explanation.append(f"Speed: time of {source.baseline_label} divided by the row's time.")
    builders = charts.time, charts.memory
    return Section(
        "Lengths swept",
        explanation,
        tables=source.tables(source.rows, _LENGTHS),
        charts=charts.of_each_workload(source, source.rows, *builders),
    )


# ---- longest lengths -----------------------------------------------------------------------------

_MAXIMA: Columns = (
    *split_names("label world_size max_tokens"),
    *optional(SearchRow, "density_achieved", "fits_tokens"),
    *split_names("tokens_per_rank first_failure limited_by failure_phase floor_tokens"),
    *split_names("fraction_of_floor peak_bytes imbalance bytes_per_token predicted_tokens runs"),
    "confirmations",
)


def maxima(source: Source) -> Section:
    """Build a table of all searches per workload, the longest first, and bar charts."""
    rows = sorted(source.maxima, key=lambda row: (not row.is_full_pass, -row.max_tokens))
    explanations = {
        "Max tokens and the floor are those of all ranks together; Tokens per rank and Peak memory "
        "are the largest of any rank.": has_several_ranks(rows),
        "Fit only, and Fits in memory: loops were shortened, under the same memory budget. "
        "Outputs and times were not checked.": any(row.fit_only for row in rows),
        "Recomputed: only q, k and v are kept between forward and backward.": any(
            row.keep == "inputs" for row in rows
        ),
        "In place: outputs overwrite inputs; the floor counts both.": any(
            row.keep == "nothing" for row in rows
        ),
        "Offloaded: q, k, v and the output are in the host's memory, so the device's budget "
        "and the floor do not limit their length.": any(row.offloads for row in rows),
    }
    return Section(
        "Longest lengths",
        [words for words, is_needed in explanations.items() if is_needed],
        tables=source.tables(rows, _MAXIMA),
        charts=charts.by_limit(source),
    )


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
