"""Time, memory and speed relative to a baseline, ranked by time."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.labels import speeds
from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, build_table, time_or_status
from longseq_bench.reports.document import Cell, Section, Table, format_ratio
from longseq_bench.reports.groups import capitalize_first, common_length, group_by_workload
from longseq_bench.reports.wording import find_ties


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
    explanation = (
        "At the longest length at which most rows were ok. Slower: the row's time divided by "
        "that of the next faster row; ≈: no significant difference.",
        "Relative speed: time of the baseline (on the same number of ranks, else on the fewest) "
        "divided by the row's time.",
    )
    builders = charts.time, charts.memory, charts.roofline
    return Section(
        "Time, memory, relative speed",
        [*explanation, *charts.limit_note(source.rows, 3)],
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
