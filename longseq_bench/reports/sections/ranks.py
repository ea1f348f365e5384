"""Trials on several ranks: figures of each rank, one rank against several."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_seconds
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import (
    Columns,
    ValueColumn,
    speedup_with_interval,
    time_with_interval,
)
from longseq_bench.reports.document import MISSING, Axis, Chart, Guide, Point, Section, build_chart
from longseq_bench.reports.groups import at_length, common_length, most_shared, split_names
from longseq_bench.reports.sections.failures import index_one_rank
from longseq_bench.reports.sections.gains import judge

# ---- figures of each rank ------------------------------------------------------------------------


def rank_column(
    heading: str, name: str, write: Callable[[float], str] = format_bytes
) -> ValueColumn:
    """Return the column of a field with a figure of each rank."""

    def join(row: Row) -> str | None:
        each = getattr(row, name)
        return each and " · ".join(MISSING if one is None else write(one) for one in each)

    return ValueColumn(heading, "text", join)


_PEAKS = rank_column("Peak of each rank", "rank_peaks")
_SWEPT: Columns = (
    *split_names("label tokens world_size status time_s tokens_per_s imbalance work_imbalance"),
    rank_column("Time of each rank", "rank_times", format_seconds),
    _PEAKS,
    rank_column("Bytes sent by each rank", "rank_bytes"),
    rank_column("By formula", "rank_formulas"),
)


def each_rank(source: Source) -> Section:
    """Build a row per trial on several ranks, with the figures of each rank in rank order."""
    known = attrgetter("rank_times", "rank_peaks", "rank_bytes", "rank_formulas")
    swept = [row for row in source.rows if row.world_size > 1 and any(known(row))]
    found = [r for r in source.maxima if r.world_size > 1 and r.rank_peaks is not None]
    columns: Columns = ("label", "max_tokens", "world_size", _PEAKS)
    tables = [*source.tables(swept, _SWEPT), *source.tables(found, columns, "at the maximum")]
    words = "Figures of each rank are from the first to the last; bytes are those of one pass."
    return Section("Ranks", [words], tables=tables)


# ---- one rank against several --------------------------------------------------------------------


def find_compared(source: Source) -> list[SweepRow]:
    """Return rows on several ranks whose trial was timed on one, the highest speed-up first."""
    known = (row for row in source.rows if row.speedup and row.world_size > 1)
    return sorted(known, key=lambda row: -require(row.speedup))


def find_shared(source: Source) -> list[SweepRow]:
    """Return those of the workload and length that most have."""
    return common_length(most_shared(find_compared(source)))


def against_one(source: Source) -> Section:
    """Compare one rank with several: times and peaks of sweeps; the longest lengths first."""
    known = sorted(find_compared(source), key=lambda row: -row.tokens)
    words = "The same total work on one rank and on several. Ranks of a CPU share its cores."
    one_rank = index_one_rank(row for row in source.rows if row.time_s)
    columns: Columns = (
        *split_names("label tokens world_size"),
        ValueColumn("Speed-up over one", "ratio", speedup_with_interval),
        ValueColumn("Verdict", "text", lambda row: judge(speedup_with_interval(row) or 0.0)),
        "efficiency",
        ValueColumn("Peak on one", "bytes", lambda row: one_rank[row.ranks_key].peak_bytes),
        ValueColumn("Peak of a rank", "bytes", attrgetter("peak_bytes")),
        "exposed_share",
        ValueColumn("Time on one", "seconds", lambda r: time_with_interval(one_rank[r.ranks_key])),
        *split_names("time_s bytes_sent"),
    )
    shared = find_shared(source)
    chart = _chart_speedups(shared, source.workload(shared[0])) if shared else None
    return Section(
        "One rank against several",
        [words],
        tables=source.tables(known, columns),
        charts=[chart] if chart else [],
    )


def _chart_speedups(rows: Sequence[SweepRow], where: str) -> Chart | None:
    """Chart the speed-ups of one length as sorted bars, with a tick at 1."""
    words = "as fast as one rank"
    points = [Point(r.name, 0, require(r.speedup), r.speedup_low, r.speedup_high) for r in rows]
    ones = Guide(words, tuple(Point(p.series, 0, 1.0) for p in points), words)
    where = at_length(where, rows[0].tokens)
    return build_chart("speed-up", where, None, Axis("Speed-up", "ratio"), points, (), ones)
