"""One rank against several: batch, length, time, memory of each rank, and maxima."""

from operator import attrgetter

from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import SCALING, SWEEP_RANKS, Source
from longseq_bench.reports.columns import Columns, ValueColumn, time_with_interval
from longseq_bench.reports.document import Section, Table, format_ratio
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.findings import find_largest_imbalance, index_one_rank
from longseq_bench.reports.sections.ranks import rank_column

_BATCHES: Columns = (
    "label", "batch", "tokens", "world_size", "status", "time_s", "tokens_per_s",
    rank_column("Memory of each rank", "rank_peaks"), "imbalance",
)  # fmt: skip


def batches(source: Source) -> Section:
    """Build the table of all trials on several ranks, with batch and each rank's memory."""
    several = [row for row in source.rows if row.world_size > 1]
    uneven = filter(None, map(find_largest_imbalance, group_by_workload(several)))
    points = [
        f"Largest imbalance{source.where(worst)}: {worst.name} at "
        f"{format_tokens(worst.tokens)} tokens; its largest peak is "
        f"{format_ratio(worst.imbalance or 1.0)} the smallest."
        for worst in uneven
    ]
    explanation = (
        "Memory: peak of each rank, from the first to the last. Imbalance: largest peak divided by "
        "the smallest. Time: of the slowest rank."
    )
    return Section(
        "Batch, length, time and memory",
        [explanation, *section_charts.limit_note(several)],
        points,
        source.tables(several, _BATCHES),
        charts=section_charts.charts(source, several, section_charts.rank_peaks),
        missing=("trial on several ranks", SWEEP_RANKS),
    )


def against_one(source: Source) -> Section:
    """Compare one rank with several: times and peaks of sweeps, maxima of searches."""
    maxima, points = _maxima(source)
    return Section(
        "Single against many",
        ["The same total work on one rank and on several. Ranks of a CPU share its cores."],
        points,
        [*_times(source), *maxima],
        missing=("trial that ran on one rank and on several", SWEEP_RANKS, SCALING),
    )


def _times(source: Source) -> list[Table]:
    one_rank = index_one_rank(row for row in source.rows if row.time_s)
    columns: Columns = (
        "label", "tokens", "world_size",
        ValueColumn("Time on one", "seconds", lambda r: time_with_interval(one_rank[r.ranks_key])),
        "time_s", "speedup", "efficiency",
        ValueColumn("Peak on one", "bytes", lambda row: one_rank[row.ranks_key].peak_bytes),
        ValueColumn("Peak of a rank", "bytes", attrgetter("peak_bytes")), "exposed_share",
    )  # fmt: skip
    known = (row for row in source.rows if row.speedup and row.world_size > 1)
    return source.tables(known, columns)


def _maxima(source: Source) -> tuple[list[Table], list[str]]:
    """Return tables of maxima on several ranks, and a sentence on the largest gain of each."""
    one_rank = {k: row for k, row in index_one_rank(source.maxima).items() if row.max_tokens}
    several = [row for row in source.maxima if row.world_size > 1 and row.is_full_pass]
    known = [row for row in several if row.ranks_key in one_rank]

    def times(row: SearchRow) -> float:
        return row.max_tokens / one_rank[row.ranks_key].max_tokens

    columns: Columns = (
        "label", "world_size",
        ValueColumn("Max on one rank", "tokens", lambda row: one_rank[row.ranks_key].max_tokens),
        ValueColumn("Max on all", "tokens", attrgetter("max_tokens")),
        ValueColumn("Times as long", "ratio", times), "limited_by",
    )  # fmt: skip
    largest = [max(group, key=times) for _, group in source.workloads(known)]
    points = [
        f"On {row.world_size} ranks, {row.label} gains most{source.where(row)}: "
        f"{row.max_tokens:,} tokens against {one_rank[row.ranks_key].max_tokens:,} on one rank, "
        f"{format_ratio(times(row))} ({format_share(times(row) / row.world_size)} of linear)."
        for row in largest
        if times(row) > 1
    ]
    return source.tables(known, columns, "longest lengths"), points
