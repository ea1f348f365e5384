"""The length from which several ranks or sparsity pay: speeds against a reference."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, speedup_with_interval
from longseq_bench.reports.document import Section, Spread
from longseq_bench.reports.groups import group_by_workload

FASTER, SLOWER, SAME, UNKNOWN = "faster", "slower", "no significant difference", "not known"
"""Verdicts on a speed ratio and its interval; a single pass has no interval."""
Ratio = Callable[[SweepRow], Spread | float | None]
"""Speed of a row over a reference, with its interval; a number for a single pass; None if the row
can't be compared."""


class Gain(NamedTuple):
    """A verdict on all lengths of one implementation.

    since, tokens: the shortest length from which it holds, and the longest; ratio: at `tokens`.
    """

    name: str
    against: str
    verdict: str
    since: int | None
    ratio: Spread | float
    tokens: int


def judge(ratio: Spread | float) -> str:
    """Return the verdict on a ratio of speeds."""
    if not isinstance(ratio, Spread):
        return UNKNOWN
    return FASTER if ratio.low > 1 else SLOWER if ratio.high < 1 else SAME


def _over_dense(row: SweepRow) -> Spread | float | None:
    if not row.is_sparse:
        return None
    if row.speed_over_dense is None or row.share_low is None:
        return row.speed_over_dense
    low = require(row.dense_low_s) / require(row.time_high_s)
    return Spread(row.speed_over_dense, low, require(row.dense_high_s) / require(row.time_low_s))


ONE_RANK, DENSE = "one rank", "dense attention"
REFERENCES: dict[str, Ratio] = {ONE_RANK: speedup_with_interval, DENSE: _over_dense}


def where_it_pays(source: Source, references: Sequence[str] = (*REFERENCES,)) -> Section:
    """Build a table per workload with a verdict per implementation and reference."""
    words = (
        "Dense attention: exact attention on the same inputs, by the kernel that the section on "
        "sparse attention names; computed: from the time of some of its rows."
    )
    groups = [(rows[0], find_gains(rows, references)) for rows in group_by_workload(source.rows)]
    found = [
        build_table(source.title(first), _COLUMNS, gains, keep_empty=True)
        for first, gains in groups
        if gains
    ]
    explanation = [words] if DENSE in references else []
    return Section("Where it begins to pay", explanation, tables=found)


def find_gains(rows: Iterable[SweepRow], references: Sequence[str]) -> list[Gain]:
    """Return a verdict per implementation and reference, the best of a reference first."""
    series = group_by(sorted(rows, key=attrgetter("tokens")), attrgetter("name")).values()
    gains = [gain for some in series for gain in _judge_series(some, references)]
    return sorted(gains, key=lambda gain: (gain.against, -middle(gain.ratio)))


def middle(ratio: Spread | float) -> float:
    """Return a ratio without its interval."""
    return ratio.value if isinstance(ratio, Spread) else ratio


def _judge_series(rows: Sequence[SweepRow], references: Sequence[str]) -> Iterator[Gain]:
    """Yield the verdicts on the rows of one implementation, the shortest first."""
    for against in references:
        ratios = ((row, REFERENCES[against](row)) for row in rows)
        known = [(row, ratio) for row, ratio in ratios if ratio is not None]
        if not known:
            continue
        timed = [(row, ratio) for row, ratio in known if isinstance(ratio, Spread)]
        row, ratio = (timed or known)[-1]
        verdict = judge(ratio)
        ends = {one.tokens for one, other in timed if judge(other) != verdict}
        ends |= {one.tokens for one in rows if one.status != "ok" and one.tokens < row.tokens}
        above = [one.tokens for one, _ in timed if one.tokens > max(ends, default=0)]
        source = str(row.dense_source).partition(" ")[0]
        computed = f", {source}" if against == DENSE and source != "measured" else ""
        yield Gain(
            row.claim_name, against + computed, verdict, min(above, default=None), ratio, row.tokens
        )


_COLUMNS = (
    ValueColumn("Implementation", "text", attrgetter("name")),
    ValueColumn("Against", "text", attrgetter("against")),
    ValueColumn("Verdict", "text", attrgetter("verdict")),
    ValueColumn("From", "tokens", attrgetter("since")),
    ValueColumn("Ratio", "ratio", attrgetter("ratio")),
    ValueColumn("At", "tokens", attrgetter("tokens")),
)
