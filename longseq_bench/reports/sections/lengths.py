"""Lengths swept: a table a workload, a row a trial."""

from __future__ import annotations

from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Section
from longseq_bench.reports.fields import Field, of_ranks, plain, rows_table
from longseq_bench.reports.groups import grouped
from longseq_bench.reports.sections.findings import time_of
from longseq_bench.reports.sections.ranks import said_of_ranks

_LENGTHS = (
    plain("Implementation", "text", "label"),
    plain("Tokens", "tokens", "tokens"),
    of_ranks("Ranks", "count", "world_size"),
    of_ranks("Tokens a rank", "tokens", "tokens_per_rank"),
    plain("Status", "text", "status"),
    Field("Time", "seconds", time_of),
    plain("Samples", "count", "samples"),
    of_ranks("Compute only", "seconds", "compute_time_s"),
    of_ranks("Communication only", "seconds", "communication_time_s"),
    of_ranks("Exposed", "share", "exposed_share"),
    of_ranks("Speed-up", "ratio", "speedup"),
    of_ranks("Efficiency", "share", "efficiency"),
    of_ranks("Sent a rank", "bytes", "bytes_sent"),
    plain("Peak memory", "bytes", "peak_bytes"),
    Field("Least peak", "bytes", lambda row: row.least_peak_bytes, False, True),
    of_ranks("Imbalance", "ratio", "imbalance"),
    plain("Tokens/s", "count", "tokens_per_s"),
    plain("Effective FLOP/s", "flop_rate", "effective_flops"),
    plain("Max error", "error", "max_error"),
    plain("Wire error", "error", "wire_error", False),
    plain("Density asked", "share", "density_asked", False),
    plain("Density achieved", "share", "density_achieved", False),
    Field("Uncovered", "share", lambda row: row.uncovered or None, False),
    Field("Zero rows", "share", lambda row: row.zero_rows or None, False),
    plain("Speed", "ratio", "speed", False),
)


def lengths(source: Source) -> Section:
    """A table and charts a workload of every measured row."""
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
        said + said_of_ranks(source.rows) + section_charts.cut(source.rows, 3),
        tables=[rows_table(g, source, _LENGTHS) for g in grouped(source.rows)],
        charts=section_charts.charts(
            source,
            source.rows,
            section_charts.time,
            section_charts.memory,
            section_charts.throughput,
        ),
    )


def over_ranks(source: Source) -> Section:
    """Rows on several ranks, with those on one that they stand beside."""
    tables = []
    for group in grouped(source.rows):
        several = {row.label for row in group if row.world_size > 1}
        rows = [row for row in group if row.label in several]
        if rows:
            tables.append(rows_table(rows, source, _LENGTHS))
    pictures = section_charts.charts(source, source.rows, section_charts.speedup)
    return Section(
        "Many ranks",
        [*said_of_ranks(source.rows), *section_charts.cut(source.rows)],
        tables=tables,
        charts=pictures,
    )
