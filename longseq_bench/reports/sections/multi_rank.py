"""One rank against several: batch, length, time, memory of each rank, and maxima."""

from collections.abc import Iterator

from longseq_bench.analysis.row import require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_cell
from longseq_bench.reports.fields import computed, rows_table, time_with_interval
from longseq_bench.reports.groups import capitalize_first, group_by_workload
from longseq_bench.reports.sections.findings import index_one_rank, limit_sentences
from longseq_bench.reports.sections.ranks import format_rank_bytes

_BATCHES = (
    "label", "batch", "tokens", "world_size", "status", "time_s", "tokens_per_s",
    computed("Memory of each rank", "text", lambda row: format_rank_bytes(row.rank_peaks)),
    "imbalance",
)  # fmt: skip
_AGAINST = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Ranks", "count"),
    Column("Time on one", "seconds"), Column("Time", "seconds"), Column("Speed-up", "ratio"),
    Column("Efficiency", "share"), Column("Peak on one", "bytes"),
    Column("Peak of a rank", "bytes"), Column("Exposed", "share"),
)  # fmt: skip
_MAXIMA = (
    Column("Implementation"), Column("Ranks", "count"), Column("Max on one rank", "tokens"),
    Column("Max on all", "tokens"), Column("Times as long", "ratio"), Column("Limited by"),
)  # fmt: skip
SWEEP_RANKS = "longseq sweep configs/parallel.yaml"


def batches(source: Source) -> Section:
    """Build the table of all trials on several ranks, with batch and each rank's memory."""
    several = [row for row in source.rows if row.world_size > 1]
    if not several:
        return missing_section(
            "Batch, length, time and memory", "trial on several ranks", SWEEP_RANKS
        )
    tables = [rows_table(group, source, _BATCHES) for group in group_by_workload(several)]
    said = (
        "Memory is the peak of each rank, from the first to the last; imbalance the largest over "
        "the least. Time is the slowest rank's."
    )
    pictures = section_charts.charts(source, several, section_charts.each_peak)
    points = limit_sentences(_uneven(source, several))
    return Section(
        "Batch, length, time and memory",
        [said, *section_charts.cut(several)],
        points,
        tables,
        charts=pictures,
    )


def _uneven(source: Source, rows: list[SweepRow]) -> Iterator[str]:
    for group in group_by_workload(rows):
        known = [row for row in group if row.imbalance is not None]
        if known:
            worst = max(known, key=lambda row: require(row.imbalance))
            if format_cell(worst.imbalance, "ratio") == format_cell(1.0, "ratio"):
                continue
            yield (
                f"Least even ({source.workload(worst)}): {worst.name} at "
                f"{format_tokens(worst.tokens)} tokens, the largest peak "
                f"{format_cell(worst.imbalance, 'ratio')} the least."
            )


def against_one(source: Source) -> Section:
    """Compare one rank with several: times and peaks of sweeps, maxima of searches."""
    tables = [*_times(source), *_lengths(source)]
    if not tables:
        return missing_section(
            "Single against many", "trial that ran on one rank and on several", SWEEP_RANKS,
            "longseq scaling --impl ring --impl ulysses --world-sizes 1,2",
        )  # fmt: skip
    said = (
        "The same total work on one rank and on several. Ranks of a CPU share its cores and its "
        "memory; threads a rank say how many of the cores each has."
    )
    return Section("Single against many", [said], limit_sentences(_gains(source)), tables)


def _times(source: Source) -> Iterator[Table]:
    for group in group_by_workload(source.rows):
        alone = index_one_rank(row for row in group if row.time_s)
        rows = [
            _against(row, one)
            for row in group
            if row.speedup and row.world_size > 1
            if (one := alone.get(row.ranks_key))
        ]
        if rows:
            yield Table(_title(source, group[0]), _AGAINST, tuple(rows))


def _against(row: SweepRow, alone: SweepRow) -> tuple[Cell, ...]:
    return (
        row.label, row.tokens, row.world_size, time_with_interval(alone), time_with_interval(row),
        row.speedup, row.efficiency, alone.peak_bytes, row.peak_bytes,
        row.exposed_share,
    )  # fmt: skip


def _lengths(source: Source) -> Iterator[Table]:
    for group in group_by_workload(source.maxima):
        rows = [
            (
                row.label, row.world_size, alone.max_tokens, row.max_tokens,
                row.max_tokens / alone.max_tokens, row.limited_by,
            )
            for row, alone in _grown(group)
        ]  # fmt: skip
        if rows:
            title = f"longest lengths: {source.workload(group[0])}"
            yield Table(capitalize_first(title), _MAXIMA, tuple(rows))


def _grown(group: list[SearchRow]) -> Iterator[tuple[SearchRow, SearchRow]]:
    """Return maxima on several ranks, each with that on one rank, of full passes."""
    alone = index_one_rank(group)
    for row in group:
        one = alone.get(row.ranks_key) if row.world_size > 1 and row.is_full_pass else None
        if one is not None and one.max_tokens:
            yield row, one


def _gains(source: Source) -> Iterator[str]:
    for group in group_by_workload(source.maxima):
        pairs = _grown(group)
        found = [(row, alone) for row, alone in pairs if row.max_tokens > alone.max_tokens]
        if found:
            row, alone = max(found, key=lambda one: one[0].max_tokens / one[1].max_tokens)
            grown = row.max_tokens / alone.max_tokens
            yield (
                f"Ranks lengthen {row.label} most ({source.workload(row)}): "
                f"{row.world_size} ranks take {row.max_tokens:,} tokens, one takes "
                f"{alone.max_tokens:,}: {format_cell(grown, 'ratio')}, "
                f"{format_share(grown / row.world_size)} of as many times as there are ranks."
            )


def _title(source: Source, row: SweepRow) -> str:
    words = source.workload(row)
    return capitalize_first(words)
