"""Bottlenecks of trials on several ranks by measurement: compute or communication."""

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Section

_EXPLANATION = (
    "Communication if it adds more than half of the time, compute if it adds less, either if the "
    "interval includes one half."
)


def bottleneck(source: Source) -> Section:
    """Build a row per trial on several ranks: its bottleneck, and the evidence."""
    tables = source.tables(find_timed(source), _COLUMNS)
    return Section("Bottlenecks", [_EXPLANATION], tables=tables)


def find_timed(source: Source) -> list[SweepRow]:
    """Return the trials on several ranks whose communication was timed separately."""
    return [r for r in source.rows if r.world_size > 1 and r.exposed_share is not None]


def find_bottleneck(row: SweepRow) -> str:
    """Name the bottleneck of a row, by the share of its time that communication adds."""
    low, high = row.exposed_low, row.exposed_high
    if low is not None and high is not None and low < 0.5 < high:
        return "either"
    return "communication" if require(row.exposed_share) > 0.5 else "compute"


_COLUMNS: Columns = (
    "label", "world_size", "tokens", "time_s", "compute_time_s", "communication_time_s",
    "exposed_share", "exposed_low", "exposed_high",
    ValueColumn("Bottleneck", "text", find_bottleneck),
)  # fmt: skip
