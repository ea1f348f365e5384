"""One rank against several: speed-ups, and the length from which several ranks pay."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import (
    Columns,
    ValueColumn,
    speedup_with_interval,
    time_with_interval,
)
from longseq_bench.reports.document import Axis, Chart, Guide, Point, Section, Spread, build_chart
from longseq_bench.reports.groups import at_length, common_length, most_shared, split_names
from longseq_bench.reports.sections.failures import index_one_rank

FASTER, SLOWER, SAME, UNKNOWN = "faster", "slower", "no significant difference", "not known"
"""Verdicts on a speed-up and its interval; a single pass has no interval."""


class Gain(NamedTuple):
    """A verdict on all lengths of one implementation on several ranks.

    since, tokens: the shortest length from which it holds, and the longest; ratio: at `tokens`.
    """

    name: str
    verdict: str
    since: int | None
    ratio: Spread | float
    tokens: int


def judge(ratio: Spread | float) -> str:
    """Return the verdict on a ratio of speeds."""
    if not isinstance(ratio, Spread):
        return UNKNOWN
    return FASTER if ratio.low > 1 else SLOWER if ratio.high < 1 else SAME


def find_gains(rows: Iterable[SweepRow]) -> list[Gain]:
    """Return a verdict on the speed over one rank per implementation, the best first."""
    series = group_by(sorted(rows, key=attrgetter("tokens")), attrgetter("name")).values()
    gains = filter(None, map(_judge_series, series))
    return sorted(gains, key=lambda gain: -middle(gain.ratio))


def middle(ratio: Spread | float) -> float:
    """Return a ratio without its interval."""
    return ratio.value if isinstance(ratio, Spread) else ratio


def _judge_series(rows: Sequence[SweepRow]) -> Gain | None:
    """Return the verdict on the rows of one implementation, the shortest first."""
    ratios = ((row, speedup_with_interval(row)) for row in rows)
    known = [(row, ratio) for row, ratio in ratios if ratio is not None]
    if not known:
        return None
    timed = [(row, ratio) for row, ratio in known if isinstance(ratio, Spread)]
    row, ratio = (timed or known)[-1]
    verdict = judge(ratio)
    ends = {one.tokens for one, other in timed if judge(other) != verdict}
    ends |= {one.tokens for one in rows if one.status != "ok" and one.tokens < row.tokens}
    above = [one.tokens for one, _ in timed if one.tokens > max(ends, default=0)]
    return Gain(row.claim_name, verdict, min(above, default=None), ratio, row.tokens)


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
