"""Swept lengths: one table per workload, one row per trial, its rounds merged."""

from dataclasses import replace

from longseq_bench.analysis.scaling import explain_high_efficiency
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, field_column, optional
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import split_names


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
