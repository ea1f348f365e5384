"""Swept lengths: one table per workload, one row per trial."""

from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import SWEEP, SWEEP_RANKS, Source
from longseq_bench.reports.columns import LEAST_PEAK, Columns, ValueColumn, optional
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import table_key
from longseq_bench.reports.sections.ranks import explain_rank_columns

_LENGTHS: Columns = (
    "label", "tokens", "world_size", "tokens_per_rank", "status", "time_s", "samples",
    "compute_time_s", "communication_time_s", "exposed_share", "speedup", "efficiency",
    "bytes_sent", "peak_bytes", LEAST_PEAK, "imbalance", "tokens_per_s", "effective_flops",
    "max_error", *optional(SweepRow, "wire_error", "density_asked", "density_achieved"),
    ValueColumn("Uncovered", "share", lambda row: row.uncovered or None, optional=True),
    ValueColumn("Zero rows", "share", lambda row: row.zero_rows or None, optional=True),
    *optional(SweepRow, "speed"),
)  # fmt: skip


def lengths(source: Source) -> Section:
    """Build a table and charts of all measured rows, per workload."""
    about = [
        "Time: median of the slowest rank; ± is the farther end of its 95 % interval (with fewer "
        "than 6 samples, of their range). A dash: not measured; Failures says why."
    ]
    if source.baseline:
        about.append(
            f"Speed: time of {source.baseline} over the row's on the same workload, on as many "
            "ranks where it ran so, else on the fewest."
        )
    makers = section_charts.time, section_charts.memory, section_charts.throughput
    return Section(
        "Lengths swept",
        about + explain_rank_columns(source.rows) + section_charts.cut(source.rows, 3),
        tables=source.tables(source.rows, _LENGTHS),
        charts=section_charts.charts(source, source.rows, *makers),
        missing=("sweep", SWEEP),
    )


def over_ranks(source: Source) -> Section:
    """Build the tables of implementations that ran on several ranks, with their rows on one."""
    several = {(row.label, table_key(row)) for row in source.rows if row.world_size > 1}
    rows = [row for row in source.rows if (row.label, table_key(row)) in several]
    return Section(
        "Many ranks",
        [*explain_rank_columns(source.rows), *section_charts.cut(source.rows)],
        tables=source.tables(rows, _LENGTHS),
        charts=section_charts.charts(source, source.rows, section_charts.speedup),
        missing=("trial on several ranks", SWEEP_RANKS),
    )
