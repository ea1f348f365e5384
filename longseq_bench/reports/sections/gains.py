"""The length from which several ranks, sparsity or dilation pay: speeds against a reference."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Section, Spread, Table
from longseq_bench.reports.groups import group_by_workload

FASTER, SLOWER, SAME, UNKNOWN = "faster", "slower", "no significant difference", "not known"
"""Verdicts on a speed ratio and its interval; a single pass has no interval."""
TITLE = "Where it begins to pay"
_EXPLANATION = (
    "Verdict: by the interval at the longest length timed more than once. From: the shortest "
    "length from which it is the same at all longer ones, without a failure in between."
)


class Reference(NamedTuple):
    """A name for what a row is compared with, and the ratio of the two speeds.

    ratio: with its interval; a number for a single pass; None if the row can't be compared.
    note: words on the time of the reference.
    """

    name: str
    ratio: Callable[[SweepRow], Spread | float | None]
    note: Callable[[SweepRow], str] = lambda row: ""


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
    note: str


def judge(ratio: Spread | float) -> str:
    """Return the verdict on a ratio of speeds."""
    if not isinstance(ratio, Spread):
        return UNKNOWN
    return FASTER if ratio.low > 1 else SLOWER if ratio.high < 1 else SAME


def _middle(ratio: Spread | float) -> float:
    return ratio.value if isinstance(ratio, Spread) else ratio


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


def _dense_note(row: SweepRow) -> str:
    source = str(row.dense_source).partition(" ")[0]
    return "" if source == "measured" else f"dense time {source}"


ONE_RANK = Reference("one rank", speedup)
DENSE = Reference("dense attention", _over_dense, _dense_note)


def where_it_pays(source: Source, references: Sequence[Reference]) -> Section:
    """Build a table per workload with a verdict per implementation and reference."""
    found = tables(source, source.rows, *references)
    paragraphs = [_EXPLANATION]
    if DENSE in references:
        paragraphs.append(
            "Dense attention: exact attention on the same inputs, by the kernel that the section "
            "on sparse attention names."
        )
    return Section(TITLE, paragraphs, tables=found)


def tables(source: Source, rows: Iterable[SweepRow], *references: Reference) -> list[Table]:
    """Return a table of verdicts per workload with any."""
    found = []
    for group in group_by_workload(rows):
        series = group_by(sorted(group, key=attrgetter("tokens")), attrgetter("name")).values()
        pairs = ((some, one) for some in series for one in references)
        if gains := [gain for pair in pairs if (gain := _judge_series(*pair))]:
            gains.sort(key=lambda gain: (gain.against, -_middle(gain.ratio)))
            found.append(build_table(source.title(group[0]), _COLUMNS, gains, keep_empty=True))
    return found


def _judge_series(rows: Sequence[SweepRow], reference: Reference) -> Gain | None:
    """Judge the rows of one implementation, the shortest first; None if none is comparable."""
    known = [(row, ratio) for row in rows if (ratio := reference.ratio(row)) is not None]
    if not known:
        return None
    timed = [(row, ratio) for row, ratio in known if isinstance(ratio, Spread)]
    row, ratio = (timed or known)[-1]
    verdict = judge(ratio)
    notes = [reference.note(row)]
    if not timed:
        notes.append("one pass, no interval")
    ends = {one.tokens for one, other in timed if judge(other) != verdict}
    ends |= {one.tokens for one in rows if one.status != "ok" and one.tokens < row.tokens}
    since = min((one.tokens for one, _ in timed if one.tokens > max(ends, default=0)), default=None)
    if timed and since == known[0][0].tokens:
        notes.append("shortest timed length")
    longest = known[-1][0].tokens
    if longest > row.tokens:
        notes.append(f"one pass at {format_tokens(longest)}")
    above = next((one for one in rows if one.status != "ok" and one.tokens > row.tokens), None)
    if above:
        notes.append(f"{above.status} at {format_tokens(above.tokens)}")
    note = ", ".join(filter(None, notes))
    return Gain(row.name, reference.name, verdict, since, ratio, row.tokens, note)


_COLUMNS = (
    ValueColumn("Implementation", "text", attrgetter("name")),
    ValueColumn("Against", "text", attrgetter("against")),
    ValueColumn("Verdict", "text", attrgetter("verdict")),
    ValueColumn("From", "tokens", attrgetter("since")),
    ValueColumn("Ratio", "ratio", attrgetter("ratio")),
    ValueColumn("At", "tokens", attrgetter("tokens")),
    ValueColumn("Note", "text", lambda gain: gain.note or None),
)
