"""The length from which several ranks, sparsity or dilation pay: speeds against a reference."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Section, Spread, Table
from longseq_bench.reports.groups import group_by_workload, join_words

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
    note: str | None


def judge(ratio: Spread | float) -> str:
    """Return the verdict on a ratio of speeds."""
    if not isinstance(ratio, Spread):
        return UNKNOWN
    return FASTER if ratio.low > 1 else SLOWER if ratio.high < 1 else SAME


def speedup(row: SweepRow) -> Spread | float | None:
    """Return the speed-up of several ranks over one, with its interval; None for one rank."""
    if row.world_size == 1:
        return None
    if row.speedup is None or row.speedup_low is None:
        return row.speedup
    return Spread(row.speedup, row.speedup_low, require(row.speedup_high))


def _over_dense(row: SweepRow) -> Spread | float | None:
    if not row.is_sparse:
        return None
    if row.speed_over_dense is None or row.share_low is None:
        return row.speed_over_dense
    low = require(row.dense_low_s) / require(row.time_high_s)
    return Spread(row.speed_over_dense, low, require(row.dense_high_s) / require(row.time_low_s))


ONE_RANK: dict[str, Ratio] = {"one rank": speedup}
DENSE: dict[str, Ratio] = {"dense attention": _over_dense}
"""References by name."""


def where_it_pays(source: Source, references: Mapping[str, Ratio]) -> Section:
    """Build a table per workload with a verdict per implementation and reference."""
    words = (
        "Dense attention: exact attention on the same inputs, by the kernel that the section on "
        "sparse attention names."
    )
    explanation = [words] if references.keys() & DENSE.keys() else []
    found = tables(source, source.rows, references)
    return Section("Where it begins to pay", explanation, tables=found)


def tables(
    source: Source, rows: Iterable[SweepRow], references: Mapping[str, Ratio]
) -> list[Table]:
    """Return a table of verdicts per workload with any."""
    found = []
    for group in group_by_workload(rows):
        series = group_by(sorted(group, key=attrgetter("tokens")), attrgetter("name")).values()
        pairs = ((some, *one) for some in series for one in references.items())
        gains = [gain for pair in pairs if (gain := _judge_series(*pair))]
        if gains:
            gains.sort(key=lambda gain: (gain.against, -_middle(gain.ratio)))
            found.append(build_table(source.title(group[0]), _COLUMNS, gains, keep_empty=True))
    return found


def _middle(ratio: Spread | float) -> float:
    return ratio.value if isinstance(ratio, Spread) else ratio


def _judge_series(rows: Sequence[SweepRow], against: str, over: Ratio) -> Gain | None:
    """Judge the rows of one implementation, the shortest first; None if none is comparable."""
    known = [(row, ratio) for row in rows if (ratio := over(row)) is not None]
    if not known:
        return None
    timed = [(row, ratio) for row, ratio in known if isinstance(ratio, Spread)]
    row, ratio = (timed or known)[-1]
    verdict = judge(ratio)
    ends = {one.tokens for one, other in timed if judge(other) != verdict}
    ends |= {one.tokens for one in rows if one.status != "ok" and one.tokens < row.tokens}
    since = min((one.tokens for one, _ in timed if one.tokens > max(ends, default=0)), default=None)
    above = next((one for one in rows if one.status != "ok" and one.tokens > row.tokens), None)
    source, longest = str(row.dense_source).partition(" ")[0], known[-1][0].tokens
    note = join_words(
        f"dense time {source}" if over is _over_dense and source != "measured" else "",
        "" if timed else "one pass, no interval",
        "shortest timed length" if timed and since == known[0][0].tokens else "",
        f"one pass at {format_tokens(longest)}" if longest > row.tokens else "",
        f"{above.status} at {format_tokens(above.tokens)}" if above else "",
    )
    return Gain(row.name, against, verdict, since, ratio, row.tokens, note or None)


_COLUMNS = (
    ValueColumn("Implementation", "text", attrgetter("name")),
    ValueColumn("Against", "text", attrgetter("against")),
    ValueColumn("Verdict", "text", attrgetter("verdict")),
    ValueColumn("From", "tokens", attrgetter("since")),
    ValueColumn("Ratio", "ratio", attrgetter("ratio")),
    ValueColumn("At", "tokens", attrgetter("tokens")),
    ValueColumn("Note", "text", attrgetter("note")),
)
