"""One line per implementation: its time at one length, and the longest length that it reached."""

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_or_status
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Cell, Section
from longseq_bench.reports.groups import common_length, in_brackets, join_words, most_shared
from longseq_bench.reports.wording import name_status

ALL = "All implementations"


class Line(NamedTuple):
    """The line of an implementation; its fastest and its longest variant may differ.

    timed: its fastest row at the common length; if none was ok there, a row that failed.
    passed: its longest row that was ok.  failed: its first row above it, which failed.
    longest: its longest search.  where: the workload of this, if it is not that of most searches.
    """

    implementation: str
    timed: SweepRow | None
    passed: SweepRow | None
    failed: SweepRow | None
    longest: SearchRow | None
    where: str

    @property
    def rank(self) -> tuple[float, int]:
        """Order by time, then by length; those without a time come last."""
        cost = _cost(self.timed) if self.timed else inf
        return cost, -(self.longest.max_tokens if self.longest else 0)


def all_implementations(source: Source) -> Section:
    """Build a line per implementation, the fastest first; per label if there is only one.

    Times are at the workload and length that most implementations share. Exact and sparse attention
    are in one table, so the share of the pairs has a column.
    """
    names = dict.fromkeys(record.trial.implementation for record in source.records)
    noun = "implementation" if len(names) > 1 else "variant"
    key = attrgetter("implementation" if len(names) > 1 else "label")
    if len(names) == 1:
        names = dict.fromkeys(map(key, [*source.rows, *source.maxima])) or names
    swept = most_shared(row for row in source.rows if row.is_full_pass)
    searched = most_shared(row for row in source.maxima if row.is_full_pass)
    at, by_name = common_length(swept, key), group_by(swept, key)
    timed = {name: min(some, key=_cost) for name, some in group_by(at, key).items()}
    shared, every = group_by(searched, key), group_by(source.maxima, key)
    lines = []
    for name in names:
        found = shared.get(name) or every.get(name, [])
        best = max(found, key=lambda row: (row.is_full_pass, row.max_tokens), default=None)
        where = source.workload(best) if best and name not in shared else ""
        lines.append(Line(name, timed.get(name), *_find_end(by_name.get(name, ())), best, where))
    lines.sort(key=attrgetter("rank"))

    title = f"One line per {noun}"
    if at:
        tokens = format_tokens(at[0].tokens)
        title += f"; time and peak memory at {tokens} tokens{source.where(at[0])}"
    if searched and (words := source.workload(searched[0])):
        title += f"; longest: {words}"
    is_swept = any(line.passed and not line.longest for line in lines)
    columns = [one for one in _COLUMNS if one.heading != "Longest swept" or is_swept]
    table = build_table(title, columns, lines)
    if len(table.columns) < 2:
        return Section(ALL)
    named = {line.timed.name for line in lines[:MAX_ANSWER_ROWS] if line.timed}
    chart = charts.time([row for row in swept if row.name in named], "")
    return Section(ALL, tables=[table], charts=[chart] if chart else [])


def _find_end(rows: Sequence[SweepRow]) -> tuple[SweepRow | None, SweepRow | None]:
    """Return the longest row that was ok, and the next longer row of its label, which failed."""
    ordered = sorted(rows, key=attrgetter("tokens"))
    passed = max((r for r in ordered if r.is_ok), key=attrgetter("tokens"), default=None)
    if passed is None:
        return None, next(iter(ordered), None)
    longer = (r for r in ordered if r.tokens > passed.tokens and r.name == passed.name)
    return passed, next(longer, None)


def _cost(row: SweepRow) -> float:
    return row.time_s if row.is_ok and row.time_s else inf


def _name(line: Line) -> str:
    best = line.timed or line.longest
    return best.name if best else line.implementation


def _density(line: Line) -> float | str | None:
    """Return the share of the pairs; "sparse" for a search, which records no such share."""
    row = line.timed
    if row and row.is_ok:
        return row.token_density if row.is_sparse else None
    return "sparse" if line.longest and line.longest.is_sparse else None


def _longest(line: Line) -> Cell:
    """Return "90,000 (ring, 10 min limit)": the name only if it is not that of the line."""
    if line.longest is None:
        return None
    tokens = f"{line.longest.max_tokens:,}" if line.longest.max_tokens else "none passed"
    variant = "" if line.longest.name == _name(line) else line.longest.name
    return tokens + in_brackets(join_words(variant, line.where))


def _longest_swept(line: Line) -> str | None:
    """Return "32k", with the failure above it: "32k, timeout at 64k"; None without rows."""
    passed = format_tokens(line.passed.tokens) if line.passed else ""
    failed = line.failed
    end = f"{name_status(failed.status)} at {format_tokens(failed.tokens)}" if failed else ""
    return join_words(passed, end) or None


_COLUMNS = (
    ValueColumn("Implementation", "text", _name),
    ValueColumn("Pairs seen", "share", _density),
    ValueColumn("Time", "seconds", lambda line: line.timed and time_or_status(line.timed)),
    ValueColumn("Unstable", "text", lambda line: line.timed and line.timed.unstable),
    ValueColumn(
        "Peak memory",
        "bytes",
        lambda line: line.timed.peak_bytes if line.timed and line.timed.is_ok else None,
        help="The largest peak of any rank.",
    ),
    ValueColumn("Longest swept", "text", _longest_swept),
    ValueColumn("Longest", "text", _longest),
    ValueColumn("Limited by", "text", lambda line: line.longest and line.longest.limited_by),
    ValueColumn("Of the floor", "share", lambda one: one.longest and one.longest.fraction_of_floor),
)
