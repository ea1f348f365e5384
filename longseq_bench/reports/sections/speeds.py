"""Time, memory and speed relative to a baseline, and the fastest of each length with its ties."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.labels import speeds
from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import (
    Columns,
    ValueColumn,
    build_table,
    time_or_status,
    time_with_interval,
)
from longseq_bench.reports.document import Cell, Section, Table, format_ratio
from longseq_bench.reports.groups import (
    capitalize_first,
    common_length,
    group_by_density,
    group_by_workload,
    split_by_sparsity,
)
from longseq_bench.reports.wording import find_ties, name_ties


class Ranked(NamedTuple):
    """A row of a ranking.  above: the next faster row.  speed: relative to a baseline."""

    row: SweepRow
    above: SweepRow | None
    speed: float | None


def relative(source: Source) -> Section:
    """Build a table per workload at the longest length that most rows ran, fastest first.

    The workload with most implementations is the first.
    """
    has_times = any(row.time_s for row in source.rows)
    groups = group_by_workload(source.rows) if has_times else []
    groups.sort(key=lambda rows: len({row.name for row in rows}), reverse=True)
    explanation = ["At the longest length at which most rows were ok."]
    builders = charts.time, charts.memory
    return Section(
        "Time, memory, relative speed",
        explanation,
        tables=[_rank(source, group) for group in groups],
        charts=charts.of_each_workload(source, source.rows, *builders) if groups else (),
    )


def _rank(source: Source, group: Sequence[SweepRow]) -> Table:
    """Rank the rows of a workload by time, failed ones last."""
    at = common_length(group)
    at.sort(key=lambda row: (not (row.is_ok and row.time_s), row.time_s or 0.0))
    timed = [row for row in at if row.is_ok and row.time_s]
    base = _find_base(source, at, timed)
    speed = speeds(at, base) if base else [None] * len(at)
    above = [None, *timed, *[None] * len(at)]
    words = [source.workload(at[0]), f"{format_tokens(at[0].tokens)} tokens"]
    title = ", ".join(filter(None, [*words, f"relative to {base}" if base else ""]))
    rows = [*map(Ranked, at, above, speed)]
    return build_table(capitalize_first(title), _COLUMNS, rows, keep_empty=True)


def _find_base(source: Source, at: Sequence[SweepRow], timed: Sequence[SweepRow]) -> str | None:
    """Return the label of the baseline: the requested one, else sdpa or dense, else the slowest.

    None if the requested one has no row here, or several with different labels.
    """
    labels = {row.label for row in timed}
    if wanted := source.baseline_label:
        named = {row.label for row in at if wanted in (row.label, row.implementation)}
        return wanted if wanted in named else named.pop() if len(named) == 1 else None
    preferred = [name for name in ("sdpa", "dense") if name in labels]
    return next(iter([*preferred, *(row.label for row in reversed(timed))]), None)


def _over_above(item: Ranked) -> Cell:
    """Return the time divided by that of the row above: "1.32×", "≈" where intervals overlap."""
    if item.above is None or not item.row.time_s:
        return None
    ratio = format_ratio(item.row.time_s / require(item.above.time_s))
    if min(item.row.samples, item.above.samples) < 2:
        return f"{ratio} (one pass)"
    ties = find_ties([item.above, item.row], "time_low_s", "time_high_s")
    return "≈" if len(ties) > 1 else ratio


_COLUMNS: Columns = (
    ValueColumn("Implementation", "text", attrgetter("row.name")),
    ValueColumn(
        "Pairs seen", "share", lambda item: item.row.token_density if item.row.is_sparse else None
    ),
    ValueColumn("Time", "seconds", lambda item: time_or_status(item.row)),
    ValueColumn("Unstable", "text", attrgetter("row.unstable"), optional=True),
    ValueColumn("Share of bandwidth", "share", attrgetter("row.share_of_bandwidth"), optional=True),
    ValueColumn("Slower than the row above", "text", _over_above),
    ValueColumn("Relative speed", "ratio", attrgetter("speed")),
    ValueColumn(
        "Peak memory", "bytes", lambda item: item.row.peak_bytes if item.row.is_ok else None
    ),
    ValueColumn("Max error", "error", attrgetter("row.max_error")),
)


# ---- the fastest of each length ------------------------------------------------------------------

# No rule depends on the name of an implementation. Exact and sparse attention compute different
# things, so they are never compared.


def fastest(source: Source) -> Section:
    """Build the table of the fastest of each workload and length, exact and sparse."""
    workload = ValueColumn(
        "Workload", "text", lambda rows: source.workload(rows[0]) or None, optional=True
    )
    explanation = (
        "Only rows of one number of ranks and of similar density (within 10 %), timed more than "
        "once, are compared. Ratio: time of the next that is slower for certain divided by Time."
    )
    found = [rows for group in group_by_workload(source.rows) for rows in _compared(group)]
    tables = [build_table("", (workload, *_FASTEST), found)] if found else []
    return Section("Fastest by length", [explanation], tables=tables)


def _compared(group: Sequence[SweepRow]) -> Iterator[list[SweepRow]]:
    """Yield the compared rows of a workload and length, the fastest first; exact attention first.

    Only rows of the same number of ranks and of similar density are compared.
    """
    timed = [row for row in group if row.time_s and row.samples > 1]
    timed.sort(key=lambda row: (row.world_size, row.tokens, require(row.time_s)))
    for rows in split_by_sparsity(timed).values():
        for some in group_by(rows, attrgetter("world_size", "tokens")).values():
            yield from (similar for similar in group_by_density(some) if len(similar) > 1)


def _fastest(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the fastest row, and the rows whose intervals overlap with its interval."""
    return find_ties(rows, "time_low_s", "time_high_s")


def _next(rows: Sequence[SweepRow]) -> SweepRow | None:
    """Return the fastest row that is slower for certain."""
    ties = set(map(id, _fastest(rows)))
    return next((row for row in rows if id(row) not in ties), None)


def _next_name(rows: Sequence[SweepRow]) -> str | None:
    slower = _next(rows)
    return slower.name if slower else None


def _next_ratio(rows: Sequence[SweepRow]) -> float | None:
    slower = _next(rows)
    return require(slower.time_s) / require(rows[0].time_s) if slower else None


_FASTEST = (
    ValueColumn("Kind", "text", lambda rows: "sparse" if rows[0].is_sparse else "exact"),
    ValueColumn("Tokens", "tokens", lambda rows: rows[0].tokens),
    ValueColumn("Density", "share", lambda rows: rows[0].density if rows[0].is_sparse else None),
    ValueColumn("Fastest", "text", lambda rows: name_ties(_fastest(rows))),
    ValueColumn("Time", "seconds", lambda rows: time_with_interval(rows[0])),
    ValueColumn("Next", "text", _next_name),
    ValueColumn("Ratio", "ratio", _next_ratio),
)
