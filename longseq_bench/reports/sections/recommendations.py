"""Recommendations: rules over the rows of a report, each with the figures that support it.

No rule depends on the name of an implementation. Exact and sparse attention compute different
things, so they are never compared.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import SWEEP, Source
from longseq_bench.reports.columns import ValueColumn, build_table, time_with_interval
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import (
    group_by_density,
    group_by_ranks,
    group_by_workload,
    split_by_sparsity,
)
from longseq_bench.reports.wording import find_ties, join_names

TIE = "no significant difference"


def find_longest_ties(rows: Sequence[SearchRow]) -> list[SearchRow]:
    """Return the longest row, and those whose bracket does not exclude its length."""
    ordered = sorted(rows, key=lambda row: -row.max_tokens)
    most = ordered[0].max_tokens
    return [r for r in ordered if r.max_tokens >= most or (r.first_failure or most + 1) > most]


def name_ties(rows: Sequence[Row]) -> str:
    """Return the name of the best row; of several, that they do not differ, and their names."""
    names = join_names(row.name for row in rows)
    return names if len(rows) == 1 else f"{TIE}: {names}"


def _kind(row: Row) -> str:
    return "sparse" if row.is_sparse else "exact"


def _density(row: Row) -> float | None:
    return row.density if row.is_sparse else None


class RankedLength(NamedTuple):
    """Rows of one length that are compared; each was timed more than once; the fastest is first."""

    tokens: int
    rows: list[SweepRow]

    @property
    def fastest_rows(self) -> list[SweepRow]:
        """The fastest row, and the rows whose intervals overlap with its interval."""
        return find_ties(self.rows, "time_low_s", "time_high_s")


Failed = dict[str, dict[int, str]]
"""Lengths at which a row was not ok, with the status, by name of the row."""


class Span(NamedTuple):
    """Neighbouring lengths with the same fastest rows, in ascending order."""

    where: str | None
    lengths: Sequence[RankedLength]

    @property
    def last(self) -> RankedLength:
        """The longest length."""
        return self.lengths[-1]

    @property
    def following(self) -> SweepRow | None:
        """The fastest row at the longest length that is slower for certain."""
        ties = set(map(id, self.last.fastest_rows))
        return next((row for row in self.last.rows if id(row) not in ties), None)


def fastest(source: Source) -> Section:
    """Build the table of the fastest of each workload by length, exact and sparse."""
    spans = [
        Span(source.workload(group[0]) or None, span)
        for group in group_by_workload(source.rows)
        for lengths in rank_lengths(group)
        for span in _split_lengths(lengths, _failed(group))
    ]
    explanation = (
        "Only rows of one number of ranks and of similar density (within 10 %), timed more than "
        "once, are compared. Time and ratio: at the longest of the lengths."
    )
    tables = [build_table("", _FASTEST, spans)] if spans else []
    missing = "two implementations timed more than once at one length", SWEEP
    return Section("Fastest by length", [explanation], tables=tables, missing=missing)


def _format_span(span: Span) -> str:
    ends = (format_tokens(span.lengths[i].tokens) for i in (0, -1))
    return " to ".join(dict.fromkeys(ends))


_FASTEST = (
    ValueColumn("Workload", "text", lambda span: span.where, optional=True),
    ValueColumn("Lengths", "text", _format_span),
    ValueColumn("Kind", "text", lambda span: _kind(span.last.rows[0])),
    ValueColumn("Density", "share", lambda span: _density(span.last.rows[0])),
    ValueColumn("Fastest", "text", lambda span: name_ties(span.last.fastest_rows)),
    ValueColumn("Time", "seconds", lambda span: time_with_interval(span.last.rows[0])),
    ValueColumn("Next", "text", lambda span: span.following and span.following.name),
    ValueColumn(
        "Ratio", "ratio",
        lambda span: span.following and require(span.following.time_s) / span.last.rows[0].time_s,
    ),
)  # fmt: skip


def _failed(rows: Sequence[SweepRow]) -> Failed:
    found: Failed = defaultdict(dict)
    for row in rows:
        if row.status != "ok":
            found[row.name][row.tokens] = row.status
    return found


def rank_lengths(group: Sequence[SweepRow]) -> list[list[RankedLength]]:
    """Return the compared lengths of a workload, in ascending order.

    One list per number of ranks and density, exact ones first: density is an input, not a choice.
    """
    return [
        lengths
        for rows in split_by_sparsity(group).values()
        for some in group_by_ranks(rows).values()
        for lengths in _rank_lengths(some)
    ]


def _rank_lengths(rows: Sequence[SweepRow]) -> list[list[RankedLength]]:
    timed = [row for row in rows if row.time_s and row.samples > 1]
    timed.sort(key=lambda row: (row.tokens, require(row.time_s)))
    found: list[list[RankedLength]] = []
    for tokens, some in group_by(timed, attrgetter("tokens")).items():
        for similar in group_by_density(some):
            if len(similar) < 2:
                continue
            near = (one for one in found if len(group_by_density([*_rows(one), *similar])) == 1)
            lengths = next(near, None)
            if lengths is None:
                found.append(lengths := [])
            lengths.append(RankedLength(tokens, similar))
    return found


def _rows(lengths: Sequence[RankedLength]) -> list[SweepRow]:
    return [row for length in lengths for row in length.rows]


def _split_lengths(lengths: Sequence[RankedLength], failed: Failed) -> list[list[RankedLength]]:
    """Split lengths into spans with the same fastest rows and without a failure in between."""

    def continues(one: RankedLength, other: RankedLength) -> bool:
        names = [row.name for row in one.fastest_rows]
        failures = (tokens for name in names for tokens in failed.get(name, ()))
        has_failed = any(one.tokens < tokens < other.tokens for tokens in failures)
        return names == [row.name for row in other.fastest_rows] and not has_failed

    spans: list[list[RankedLength]] = []
    for length in lengths:
        if spans and continues(spans[-1][-1], length):
            spans[-1].append(length)
        else:
            spans.append([length])
    return spans
