"""The first screen of the kind `devices`: speed-up, memory and communication of several ranks."""

from collections.abc import Iterator, Sequence

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import HIGH_EFFICIENCY
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_share, format_tokens
from longseq_bench.reports import charts, maxima_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import build_table
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    Answer,
    Finding,
    KeyFigure,
    Spread,
    Table,
    format_ratio,
)
from longseq_bench.reports.sections import growth, multi_rank
from longseq_bench.reports.sections.findings import index_one_rank
from longseq_bench.reports.sections.gains import FASTER, SAME, SLOWER, UNKNOWN, judge, speedup
from longseq_bench.reports.sections.recommendations import find_longest_ties, name_ties
from longseq_bench.reports.wording import find_ties, format_range, join_names

TITLE = "Many devices"
_VERDICTS = {
    FASTER: "Faster than one rank",
    SAME: "No significant difference",
    SLOWER: "Slower than one rank",
    UNKNOWN: "Not known (one pass, no interval)",
}


def answer(source: Source) -> Answer:
    """Compare several ranks with one at the longest length that most of a workload share."""
    rows = multi_rank.find_compared(source)
    if not rows:
        return _of_maxima(source) or _of_ranks(source)
    figures = [*_fastest(rows), *_memory(source, rows), *_exposed(rows)]
    chart, table = charts.speedups(rows, source.workload(rows[0])), table_of(source, rows)
    return Answer(figures, list(_lists(rows)), chart, table)


def table_of(source: Source, rows: Sequence[SweepRow]) -> Table:
    """Return the table of the first rows, which have one length, next to one rank."""
    cut = f"{MAX_ANSWER_ROWS} of {len(rows):,} rows, " if len(rows) > MAX_ANSWER_ROWS else ""
    at = f"{cut}{format_tokens(rows[0].tokens)} tokens"
    columns = multi_rank.compared_columns(source, short=True)
    return build_table(source.title(rows[0], start=at) or at, columns, rows[:MAX_ANSWER_ROWS])


def _lists(rows: Sequence[SweepRow]) -> Iterator[Finding]:
    by_verdict = group_by(rows, lambda row: judge(speedup(row) or 0.0))
    for verdict, words in _VERDICTS.items():
        if some := by_verdict.get(verdict):
            names = join_names((row.name for row in some), max_names=2)
            yield Finding(f"{words}, {len(some)} of {len(rows)}: {names}.", multi_rank.TITLE)


def _fastest(rows: Sequence[SweepRow]) -> Iterator[KeyFigure]:
    ties = find_ties(rows, "speedup_low", "speedup_high", largest=True)
    best = rows[0]
    ratio = require(speedup(best))
    interval = "(one pass, no interval)"
    if isinstance(ratio, Spread):
        interval = f"({format_ratio(ratio.low)} to {format_ratio(ratio.high)})"
    words = f"{best.name} at {format_tokens(best.tokens)}"
    if len(ties) > 1:
        words += f"; no significant difference from {len(ties) - 1} more"
    if (efficiency := require(best.efficiency)) > HIGH_EFFICIENCY:
        words += f"; {format_share(efficiency)} efficiency, more than the ranks explain"
    label = "Best speed-up" if require(best.speedup) >= 1 else "Least slow-down"
    yield KeyFigure(label, f"{format_ratio(require(best.speedup))} {interval}", words)


def _memory(source: Source, rows: Sequence[SweepRow]) -> Iterator[KeyFigure]:
    one_rank = index_one_rank(row for row in source.rows if row.time_s)
    known = [
        (row.peak_bytes / peak, row)
        for row in rows
        if row.peak_bytes and (peak := one_rank[row.ranks_key].peak_bytes)
    ]
    if known:
        least = min(share for share, _ in known)
        best = [row for share, row in known if share == least]
        names = join_names(row.name for row in best)
        words = f"{format_bytes(require(best[0].peak_bytes))} with {names}"
        yield KeyFigure("Least share of one rank's memory", format_share(least), words)


def _exposed(rows: Sequence[SweepRow]) -> Iterator[KeyFigure]:
    known = [row for row in rows if row.exposed_share is not None]
    if known:
        most = max(known, key=lambda row: require(row.exposed_share))
        value = format_range([require(row.exposed_share) for row in known], format_share)
        words = f"most with {most.name}" if len(known) > 1 else most.name
        yield KeyFigure("Waiting for communication (exposed)", f"{value} of the time", words)


def _of_maxima(source: Source) -> Answer | None:
    """Compare the longest lengths on several ranks with those on one."""
    rows = multi_rank.find_over_ranks(source)
    one_rank = {row.label: row.max_tokens for row in rows if row.world_size == 1 and row.max_tokens}
    several = [row for row in rows if row.world_size > 1 and row.label in one_rank]
    if not several:
        return None
    best = max(several, key=lambda row: row.max_tokens)
    times = best.max_tokens / one_rank[best.label]
    words = f"{format_ratio(times)} one rank, {format_share(times / best.world_size)} of linear"
    ties = find_longest_ties([row for row in several if row.world_size == best.world_size])
    label = f"Longest, {best.name}"
    if len(ties) > 1:
        label, words = "Longest on several ranks", f"{name_ties(ties)}; {words}"
    figure = KeyFigure(label, f"{best.max_tokens:,} tokens", words)
    table = growth.over_ranks_table(source, rows, MAX_ANSWER_ROWS)
    chart = next(iter(maxima_charts.over_ranks(source, rows)), None)
    return Answer([figure], chart=chart, table=table)


def _of_ranks(source: Source) -> Answer:
    """Describe trials on several ranks where none ran on one rank."""
    rows = multi_rank.most_shared(r for r in source.rows if r.world_size > 1 and r.time_s)
    if not rows:
        return Answer()
    where = source.workload(rows[0])
    rows.sort(key=lambda row: require(row.time_s))
    columns = "label", "tokens", "world_size", "time_s", "peak_bytes", "exposed_share", "bytes_sent"
    table = build_table(source.title(rows[0]), columns, rows[:MAX_ANSWER_ROWS])
    return Answer(list(_exposed(rows)), chart=charts.rank_peaks(rows, where), table=table)
