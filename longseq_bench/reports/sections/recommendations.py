"""The best of rows that may be compared: the longest and the fastest, with their ties.

No rule depends on the name of an implementation. Exact and sparse attention compute different
things, so they are never compared.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import Source
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


class RankedLength(NamedTuple):
    """Rows of one length that are compared; each was timed more than once; the fastest is first."""

    tokens: int
    rows: list[SweepRow]

    @property
    def fastest_rows(self) -> list[SweepRow]:
        """The fastest row, and the rows whose intervals overlap with its interval."""
        return find_ties(self.rows, "time_low_s", "time_high_s")

    @property
    def following(self) -> SweepRow | None:
        """The fastest row that is slower for certain."""
        ties = set(map(id, self.fastest_rows))
        return next((row for row in self.rows if id(row) not in ties), None)


def rank_lengths(group: Sequence[SweepRow]) -> Iterator[RankedLength]:
    """Yield the compared lengths of a workload, of exact attention first, in ascending order.

    Only rows of the same number of ranks and of similar density are compared.
    """
    timed = [row for row in group if row.time_s and row.samples > 1]
    timed.sort(key=lambda row: (row.tokens, require(row.time_s)))
    for rows in split_by_sparsity(timed).values():
        for same in group_by_ranks(rows).values():
            for tokens, some in group_by(same, attrgetter("tokens")).items():
                for similar in group_by_density(some):
                    if len(similar) > 1:
                        yield RankedLength(tokens, similar)


def fastest(source: Source) -> Section:
    """Build the table of the fastest of each workload and length, exact and sparse."""
    workload = ValueColumn(
        "Workload", "text", lambda one: source.workload(one.rows[0]) or None, optional=True
    )
    found = [one for group in group_by_workload(source.rows) for one in rank_lengths(group)]
    explanation = (
        "Only rows of one number of ranks and of similar density (within 10 %), timed more than "
        "once, are compared. Ratio: time of the next that is slower for certain divided by Time."
    )
    tables = [build_table("", (workload, *_FASTEST), found)] if found else []
    return Section("Fastest by length", [explanation], tables=tables)


_FASTEST = (
    ValueColumn("Kind", "text", lambda one: "sparse" if one.rows[0].is_sparse else "exact"),
    ValueColumn("Tokens", "tokens", attrgetter("tokens")),
    ValueColumn(
        "Density", "share", lambda one: one.rows[0].density if one.rows[0].is_sparse else None
    ),
    ValueColumn("Fastest", "text", lambda one: name_ties(one.fastest_rows)),
    ValueColumn("Time", "seconds", lambda one: time_with_interval(one.rows[0])),
    ValueColumn("Next", "text", lambda one: one.following and one.following.name),
    ValueColumn(
        "Ratio", "ratio", lambda one: one.following and one.following.time_s / one.rows[0].time_s
    ),
)
