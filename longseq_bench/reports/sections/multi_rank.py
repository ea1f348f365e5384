"""One rank against several: times and memory of sweeps."""

from collections.abc import Iterable
from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.scaling import explain_high_efficiency
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports import charts, maxima_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, time_with_interval
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import group_by_workload, longest_shared
from longseq_bench.reports.sections.findings import index_one_rank
from longseq_bench.reports.sections.gains import judge, speedup

TITLE = "One rank against several"


def against_one(source: Source) -> Section:
    """Compare one rank with several: times and peaks of sweeps; the longest lengths first."""
    known = sorted(compared(source), key=lambda row: (-row.tokens, -require(row.speedup)))
    paragraphs = [
        "The same total work on one rank and on several. Ranks of a CPU share its cores.",
        "At least, at most: bounds that the intervals of both times allow. Efficiency: speed-up "
        "divided by ranks.",
        *explain_high_efficiency(known),
        *charts.limit_note(known),
    ]
    first = find_compared(source)
    drawn = [charts.speedups(first, source.workload(first[0]))] if first else []
    drawn += charts.of_each_workload(source, known, charts.speedup_by_length)
    tables = source.tables(known, _columns(source))
    return Section(TITLE, paragraphs, tables=tables, charts=[*filter(None, drawn)])


def compared(source: Source) -> list[SweepRow]:
    """Return the rows on several ranks whose trial was also timed on one."""
    return [row for row in source.rows if row.speedup and row.world_size > 1]


def find_compared(source: Source) -> list[SweepRow]:
    """Return rows on several ranks of one workload and length, the highest speed-up first.

    The workload with the most rows at its longest shared length; the first of equal ones.
    """
    rows = most_timed(compared(source))
    return sorted(rows, key=lambda row: -require(row.speedup))


def most_timed(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Choose a workload by its rows at the longest length that several have; return these rows."""
    groups = [longest_shared(group) for group in group_by_workload(rows)]
    return max(groups, key=len, default=[])


def _columns(source: Source) -> Columns:
    """Return the columns of rows on several ranks next to the same trial on one rank."""
    one_rank = index_one_rank(row for row in source.rows if row.time_s)
    return (
        "label", "tokens", "world_size", "speedup",
        ValueColumn("At least", "ratio", attrgetter("speedup_low")),
        ValueColumn("At most", "ratio", attrgetter("speedup_high")),
        ValueColumn("Verdict", "text", lambda row: judge(speedup(row) or 0.0)), "efficiency",
        ValueColumn("Peak on one", "bytes", lambda row: one_rank[row.ranks_key].peak_bytes),
        ValueColumn("Peak of a rank", "bytes", attrgetter("peak_bytes")), "exposed_share",
        ValueColumn("Time on one", "seconds", lambda r: time_with_interval(one_rank[r.ranks_key])),
        "time_s", "bytes_sent",
    )  # fmt: skip


def find_over_ranks(source: Source) -> list[SearchRow]:
    """Return the maxima of the workload that has most of implementations on several ranks."""
    groups = group_by_workload(row for row in source.maxima if row.is_full_pass)
    several = [maxima_charts.ran_on_several(group) for group in groups]
    known = (group for group in several if len({row.world_size for row in group}) > 1)
    return max(known, key=len, default=[])
