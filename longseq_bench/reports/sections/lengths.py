"""Swept lengths: one table per workload, one row per trial."""

from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Section
from longseq_bench.reports.fields import LEAST_PEAK, TableField, only_ranks, optional, rows_table
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.ranks import explain_rank_columns

_LENGTHS = (
    "label", "tokens", only_ranks("world_size"), only_ranks("tokens_per_rank"), "status", "time_s",
    "samples", only_ranks("compute_time_s"), only_ranks("communication_time_s"),
    only_ranks("exposed_share"), only_ranks("speedup"), only_ranks("efficiency"),
    only_ranks("bytes_sent"), "peak_bytes", LEAST_PEAK, only_ranks("imbalance"), "tokens_per_s",
    "effective_flops", "max_error", optional("wire_error"), optional("density_asked"),
    optional("density_achieved"),
    TableField("uncovered", value=lambda row: row.uncovered or None, hide_empty=True),
    TableField("zero_rows", value=lambda row: row.zero_rows or None, hide_empty=True),
    optional("speed"),
)  # fmt: skip


def lengths(source: Source) -> Section:
    """Build a table and charts of all measured rows, per workload."""
    said = [
        "Time is the median; ± is the farther end of its 95 % interval (with fewer than 6 samples, "
        "of their range). Over ranks, time is the slowest rank's and memory the largest. "
        "A dash is a value that was not measured; Failures says why."
    ]
    if source.baseline:
        said.append(
            f"Speed is the time of {source.baseline} over the row's, on the same workload, and on "
            "as many ranks where it was run so, else on the fewest."
        )
    return Section(
        "Lengths swept",
        said + explain_rank_columns(source.rows) + section_charts.cut(source.rows, 3),
        tables=[rows_table(g, source, _LENGTHS) for g in group_by_workload(source.rows)],
        charts=section_charts.charts(
            source,
            source.rows,
            section_charts.time,
            section_charts.memory,
            section_charts.throughput,
        ),
    )


def over_ranks(source: Source) -> Section:
    """Build the tables of implementations that ran on several ranks, with their rows on one."""
    tables = []
    for group in group_by_workload(source.rows):
        several = {row.label for row in group if row.world_size > 1}
        rows = [row for row in group if row.label in several]
        if rows:
            tables.append(rows_table(rows, source, _LENGTHS))
    pictures = section_charts.charts(source, source.rows, section_charts.speedup)
    return Section(
        "Many ranks",
        [*explain_rank_columns(source.rows), *section_charts.cut(source.rows)],
        tables=tables,
        charts=pictures,
    )
