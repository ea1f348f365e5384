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
from longseq_bench.reports.document import Cell, Section, format_ratio
from longseq_bench.reports.groups import capitalize_first, common_length, group_by_workload
from longseq_bench.reports.wording import find_ties


class Ranked(NamedTuple):
    """A row of a ranking.  above: the next faster row.  speed: relative to a baseline."""

    row: SweepRow
    above: SweepRow | None
    speed: float | None


class Ranking(NamedTuple):
    """Rows of one workload and length, the fastest first and failed ones last.

    title: what is compared.
    """

    title: str
    rows: list[Ranked]


def relative(source: Source) -> Section:
    """Build a table per workload at the longest length that most rows ran, fastest first."""
    has_times = any(row.time_s for row in source.rows)
    groups = group_by_workload(source.rows) if has_times else []
    tables = [
        build_table(capitalize_first(found.title), COLUMNS, found.rows, keep_empty=True)
        for found in (rank_group(source, group) for group in groups)
    ]
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
        tables=tables,
        charts=charts.of_each_workload(source, source.rows, *builders) if tables else (),
    )


def rank_group(source: Source, group: Sequence[SweepRow]) -> Ranking:
    """Rank the rows of a workload by time, at the longest length at which most were ok."""
    at = common_length(group)
    at.sort(key=lambda row: (not (row.is_ok and row.time_s), row.time_s or 0.0))
    timed = [row for row in at if row.is_ok and row.time_s]
    base = _find_base(source, at, timed)
    speed = speeds(at, base) if base else [None] * len(at)
    above = [None, *timed, *[None] * len(at)]
    words = [source.workload(at[0]), f"{format_tokens(at[0].tokens)} tokens"]
    words += [f"relative to {base}"] if base else []
    return Ranking(", ".join(filter(None, words)), [*map(Ranked, at, above, speed)])


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


def over_above(item: Ranked) -> Cell:
    """Return the time divided by that of the row above: "1.32×", "≈" where intervals overlap."""
    if item.above is None or not item.row.time_s:
        return None
    ratio = format_ratio(item.row.time_s / require(item.above.time_s))
    if min(item.row.samples, item.above.samples) < 2:
        return f"{ratio} (one pass)"
    ties = find_ties([item.above, item.row], "time_low_s", "time_high_s")
    return "≈" if len(ties) > 1 else ratio


NAME = ValueColumn("Implementation", "text", attrgetter("row.name"))
TIME = ValueColumn("Time", "seconds", lambda item: time_or_status(item.row))
PAIRS = ValueColumn(
    "Pairs seen", "share", lambda item: item.row.token_density if item.row.is_sparse else None
)
ABOVE = ValueColumn("Slower than the row above", "text", over_above)
SPEED = ValueColumn("Relative speed", "ratio", attrgetter("speed"))
PEAK = ValueColumn(
    "Peak memory", "bytes", lambda item: item.row.peak_bytes if item.row.is_ok else None
)
ERROR = ValueColumn("Max error", "error", attrgetter("row.max_error"))
BANDWIDTH = ValueColumn(
    "Share of bandwidth", "share", attrgetter("row.share_of_bandwidth"), optional=True
)
UNSTABLE = ValueColumn("Unstable", "text", attrgetter("row.unstable"), optional=True)
COLUMNS: Columns = (NAME, PAIRS, TIME, UNSTABLE, BANDWIDTH, ABOVE, SPEED, PEAK, ERROR)
