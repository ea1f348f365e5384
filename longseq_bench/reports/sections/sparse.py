"""Sparse attention: the skipped share of the pairs, and the time saved."""

from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, optional
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import split_names


def sparse(source: Source) -> Section:
    """Build a table per workload of the sparse rows, and charts of their speeds over dense."""
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
    ValueColumn("Implementation", "text", attrgetter("name")),
    *split_names("tokens token_density plan_time_s time_s dense_time_s dense_source dense_kernel"),
    "speed_over_dense",
    ValueColumn("Share of ideal", "text", _share_words),
    *optional(SweepRow, "share_of_peak"),
)
