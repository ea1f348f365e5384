"""The best of each length: exact and sparse attention, speed over dense, memory."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_seconds
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import (
    COMPUTED_MARK,
    ValueColumn,
    build_table,
    time_with_interval,
)
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Cell, Chart, Table, format_ratio
from longseq_bench.reports.groups import capitalize_first, shape_key, split_by_sparsity
from longseq_bench.reports.wording import find_ties, format_range, join_names

KINDS = "exact", "sparse"


class Length(NamedTuple):
    """The ok rows of one shape and length, under all budgets.

    Rows that give some tokens of a head no key are not among them: their output is zero there.
    """

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

        Where every row is a single pass, they can't be compared, and all are returned.
        """
        timed = [row for row in split_by_sparsity(self.rows).get(kind, ()) if row.time_s]
        timed = [row for row in timed if row.samples > 1] or timed
        best = keep_fastest(timed)
        if not best or best[0].samples < 2:
            return best
        return find_ties(best, "time_low_s", "time_high_s")


class ByLength(NamedTuple):
    """The rows of one shape, and its lengths, ascending."""

    rows: Sequence[SweepRow]
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
        """Return the times of the attention that is the fastest at some length."""
        best = [some[0] for n in self.lengths for kind in KINDS if (some := n.fastest(kind))]
        failed = [row for row in self.rows if not row.is_ok]
        return charts.time_of_best([*keep_fastest(self.rows), *failed], best)


def by_length(source: Source) -> ByLength:
    """Choose the shape with the largest number of lengths; if several have it, the most rows."""
    full = [row for row in source.rows if row.is_full_pass]
    found = [ByLength(rows, _split(rows)) for rows in group_by(full, shape_key).values()]
    return max(found, key=lambda one: (len(one.lengths), len(one.rows)), default=ByLength([], []))


def keep_fastest(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Return the fastest row of each name and length, the fastest first."""
    timed = sorted((r for r in rows if r.is_ok and r.time_s), key=lambda r: require(r.time_s))
    return [some[0] for some in group_by(timed, attrgetter("name", "tokens")).values()]


def _split(rows: Iterable[SweepRow]) -> list[Length]:
    ok = (row for row in rows if row.is_ok and not row.uncovered)
    return sorted(Length(*pair) for pair in group_by(ok, attrgetter("tokens")).items())


def _of_kind(kind: str, priorities: tuple[int, int]) -> Iterator[ValueColumn]:
    """Yield the columns of the fastest of a kind: its names, and its time."""

    def name(one: Length) -> Cell:
        rows = one.fastest(kind)
        separator = ", " if rows and rows[0].samples < 2 else " ≈ "
        return join_names((row.name for row in rows), separator, max_names=1) or None

    def time(one: Length) -> Cell:
        rows = one.fastest(kind)
        if rows and rows[0].samples < 2:
            lowest = format_seconds(require(rows[0].time_s))
            return f"{'from ' * (len(rows) > 1)}{lowest} (one pass)"
        return time_with_interval(rows[0]) if rows else None

    yield ValueColumn(f"Fastest {kind}", "text", name, priorities[0])
    yield ValueColumn(f"Time, {kind}", "seconds", time, priorities[1])


def _pairs(one: Length) -> float | None:
    rows = one.fastest("sparse")
    return rows[0].token_density if rows else None


def _over_dense(one: Length) -> str | None:
    if not one.over_dense:
        return None
    speeds = [require(row.speed_over_dense) for row in one.over_dense]
    return format_range(speeds, format_ratio) + COMPUTED_MARK * one.has_computed_dense


def _least_memory(one: Length) -> str | None:
    """Return the lowest peak and its row; of rows on one rank, if there are any."""
    known = [row for row in one.rows if row.peak_bytes]
    known = [row for row in known if row.world_size == 1] or known
    if not known:
        return None
    least = min(known, key=lambda row: require(row.peak_bytes))
    ranks = " a rank" if least.world_size > 1 else ""
    return f"{format_bytes(require(least.peak_bytes))}{ranks}, {least.name}"


_COLUMNS = (
    ValueColumn("Tokens", "tokens", attrgetter("tokens"), 8),
    *_of_kind("exact", (7, 6)),
    *_of_kind("sparse", (5, 4)),
    ValueColumn("Pairs seen", "share", _pairs, 2),
    ValueColumn(
        "Over dense", "text", _over_dense, 3,
        help="Time of dense attention divided by that of sparse rows: the lowest, the highest.",
    ),
    ValueColumn(
        "Least memory", "text", _least_memory, 1, help="The lowest peak of a row on one rank."
    ),
)  # fmt: skip
