"""The best of each length: exact and sparse attention, speed over dense, memory."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import (
    COMPUTED_MARK,
    ValueColumn,
    build_table,
    format_time,
    time_with_interval,
)
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Cell, Chart, Table, format_ratio
from longseq_bench.reports.groups import SHAPE, capitalize_first, shape_key, split_by_sparsity
from longseq_bench.reports.wording import find_ties, format_range, join_names


class Length(NamedTuple):
    """The ok rows of full passes of one shape and length, under all budgets."""

    tokens: int
    rows: Sequence[SweepRow]

    @property
    def over_dense(self) -> Sequence[SweepRow]:
        """The sparse rows whose speed over dense attention is known."""
        return [row for row in self.rows if row.is_sparse and row.speed_over_dense]

    @property
    def has_computed_dense(self) -> bool:
        """True if the time of dense attention was computed from a part of its rows."""
        return any(row.dense_source != "measured" for row in self.over_dense)

    def fastest(self, kind: str) -> Sequence[SweepRow]:
        """Return the fastest row of "exact" or "sparse" attention and its ties; none without times.

        A row that was timed once counts only where no row was timed more often.
        """
        timed = [row for row in split_by_sparsity(self.rows).get(kind, ()) if row.time_s]
        timed = [row for row in timed if row.samples > 1] or timed
        timed.sort(key=lambda row: require(row.time_s))
        if not timed or timed[0].samples < 2:
            return timed[:1]
        best = group_by(timed, attrgetter("name"))  # sweeps with other budgets may share a row
        return find_ties([rows[0] for rows in best.values()], "time_low_s", "time_high_s")


class ByLength(NamedTuple):
    """The lengths of one shape, ascending."""

    shape: str
    lengths: Sequence[Length]

    def table(self) -> Table:
        """Return a row per length; of many lengths those with the most rows."""
        most = sorted(self.lengths, key=lambda one: (-len(one.rows), -one.tokens))
        shown = sorted(most[:MAX_ANSWER_ROWS])
        cut = f"{len(shown)} of {len(most)} lengths; " if len(shown) < len(most) else ""
        title = f"{cut}best of each length; ≈: no significant difference"
        if any(one.has_computed_dense for one in shown):
            title += f"; {COMPUTED_MARK}: dense time partly computed"
        return build_table(capitalize_first(title), _COLUMNS, shown)

    def chart(self) -> Chart | None:
        """Return the times of the fastest exact and sparse attention against tokens."""
        found = {
            kind: [rows[0] for one in self.lengths if (rows := one.fastest(kind))]
            for kind in ("exact", "sparse")
        }
        return section_charts.time_of_kinds(found)


def by_length(source: Source) -> ByLength:
    """Choose the shape with the largest number of lengths; if several have it, the most rows."""
    ok = [row for row in source.rows if row.is_ok and row.is_full_pass]
    found = [_split(rows) for rows in group_by(ok, shape_key).values()]
    most = max(found, key=lambda some: (len(some), sum(len(n.rows) for n in some)), default=[])
    return ByLength(source.workload(most[0].rows[0], SHAPE) if most else "", most)


def _split(rows: Iterable[SweepRow]) -> list[Length]:
    return sorted(Length(*pair) for pair in group_by(rows, attrgetter("tokens")).items())


def _name(kind: str, priority: int) -> ValueColumn:
    def value(one: Length) -> Cell:
        return join_names((row.name for row in one.fastest(kind)), " ≈ ", max_names=1) or None

    return ValueColumn(f"Fastest {kind}", "text", value, priority)


def _time(kind: str, priority: int) -> ValueColumn:
    def value(one: Length) -> Cell:
        rows = one.fastest(kind)
        if rows and rows[0].samples < 2:
            return f"{format_time(rows[0])} (one pass)"
        return time_with_interval(rows[0]) if rows else None

    return ValueColumn(f"Time, {kind}", "seconds", value, priority)


def _pairs(one: Length) -> float | None:
    rows = one.fastest("sparse")
    return rows[0].token_density if rows else None


def _over_dense(one: Length) -> str | None:
    if not one.over_dense:
        return None
    speeds = [require(row.speed_over_dense) for row in one.over_dense]
    return format_range(speeds, format_ratio) + COMPUTED_MARK * one.has_computed_dense


def _least_memory(one: Length) -> str | None:
    known = [row for row in one.rows if row.peak_bytes]
    if not known:
        return None
    least = min(known, key=lambda row: require(row.peak_bytes))
    ranks = " a rank" if least.world_size > 1 else ""
    return f"{format_bytes(require(least.peak_bytes))}{ranks}, {least.name}"


_COLUMNS = (
    ValueColumn("Tokens", "tokens", attrgetter("tokens"), 8),
    _name("exact", 7), _time("exact", 6), _name("sparse", 5),
    ValueColumn("Pairs seen", "share", _pairs, 2), _time("sparse", 4),
    ValueColumn(
        "Over dense", "text", _over_dense, 3,
        help="Time of dense attention divided by that of sparse rows: the lowest, the highest.",
    ),
    ValueColumn("Least memory", "text", _least_memory, 1, help="The lowest peak of any row."),
)  # fmt: skip
