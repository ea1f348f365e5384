"""Speeds: relative to a baseline, the fastest of each length with its ties, sparse over dense."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from longseq_bench.analysis.labels import label_option, speeds
from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import (
    Columns,
    ValueColumn,
    build_table,
    optional,
    time_or_status,
    time_with_interval,
    with_interval,
)
from longseq_bench.reports.document import Axis, Chart, Point, Section, Table, build_chart
from longseq_bench.reports.groups import (
    USUAL,
    at_length,
    capitalize_first,
    common_length,
    find_ties,
    group_by_density,
    group_by_workload,
    join_words,
    name_ties,
    split_by_sparsity,
    split_names,
)
from longseq_bench.reports.sections.lengths import chart_memory, chart_time, mark_failures


def relative(source: Source) -> Section:
    """Build a table per workload at the longest length that most rows ran, fastest first.

    The workload with most implementations is the first.
    """
    has_times = any(row.time_s for row in source.rows)
    groups = group_by_workload(source.rows) if has_times else []
    groups.sort(key=lambda rows: len({row.implementation for row in rows}), reverse=True)
    return Section(
        "Time, memory, relative speed",
        ["At the longest length at which most rows were ok."],
        tables=[_rank(source, group) for group in groups],
        charts=source.charts(source.rows, chart_time, chart_memory) if groups else (),
    )


def _rank(source: Source, group: Sequence[SweepRow]) -> Table:
    """Rank the rows of a workload by time, failed ones last."""
    at = common_length(group)
    at.sort(key=lambda row: (not (row.is_ok and row.time_s), row.time_s or 0.0))
    timed = [row for row in at if row.is_ok and row.time_s]
    base = _find_base(source, at, timed)
    speed = speeds(at, base) if base else [None] * len(at)
    words = [source.workload(at[0]), f"{format_tokens(at[0].tokens)} tokens"]
    title = ", ".join(filter(None, [*words, f"relative to {base}" if base else ""]))
    rows = [replace(row, speed=one) for row, one in zip(at, speed, strict=True)]
    return build_table(capitalize_first(title), _COLUMNS, rows, keep_empty=True)


def _find_base(source: Source, at: Sequence[SweepRow], timed: Sequence[SweepRow]) -> str | None:
    """Return the label of the baseline: the requested one, else sdpa or dense, else the slowest.

    None if the requested one has no row here, or several with different labels.
    """
    labels = {row.label for row in timed}
    if wanted := source.baseline_label:
        named = {row.label for row in at if wanted in (row.label, row.implementation)}
        return wanted if wanted in named else named.pop() if len(named) == 1 else None
    preferred = [name for name in USUAL if name in labels]
    return next(iter([*preferred, *(row.label for row in reversed(timed))]), None)


_COLUMNS: Columns = (
    ValueColumn("Implementation", "text", attrgetter("name")),
    ValueColumn("Pairs seen", "share", lambda row: row.token_density if row.is_sparse else None),
    ValueColumn("Time", "seconds", time_or_status),
    *optional(SweepRow, "unstable", "check_limits"),
    ValueColumn("Share of bandwidth", "share", attrgetter("share_of_bandwidth"), optional=True),
    ValueColumn("Relative speed", "ratio", attrgetter("speed")),
    ValueColumn("Peak memory", "bytes", lambda row: row.peak_bytes if row.is_ok else None),
    "max_error",
)


# ---- the fastest of each length ------------------------------------------------------------------

# No rule depends on the name of an implementation. Exact and sparse attention compute different
# things, so they are never compared.


def fastest(source: Source) -> Section:
    """Build the table of the fastest of each workload and length, exact and sparse."""
    explanation = (
        "Only rows of one number of ranks and of similar density (within 10 %), timed more than "
        "once, are compared. Ratio: time of the next that is slower for certain divided by Time."
    )
    groups = group_by_workload(source.rows)
    found = [one for rows in groups for one in _compared(rows, source.workload(rows[0]))]
    tables = [build_table("", _FASTEST, found)] if found else []
    return Section("Fastest by length", [explanation], tables=tables)


class Fastest(NamedTuple):
    """The fastest of compared rows, those whose intervals overlap with its own, and the next."""

    workload: str
    best: SweepRow
    ties: Sequence[SweepRow]
    next: SweepRow | None


def _compared(group: Sequence[SweepRow], workload: str) -> Iterator[Fastest]:
    """Yield the fastest of each length of a workload; exact attention first.

    Only rows of the same number of ranks and of similar density are compared.
    """
    timed = [row for row in group if row.time_s and row.samples > 1]
    timed.sort(key=lambda row: (row.world_size, row.tokens, require(row.time_s)))
    for rows in split_by_sparsity(timed).values():
        for some in group_by(rows, attrgetter("world_size", "tokens")).values():
            for similar in (similar for similar in group_by_density(some) if len(similar) > 1):
                ties = find_ties(similar, "time_low_s", "time_high_s")
                slower = (row for row in similar if not any(row is tie for tie in ties))
                yield Fastest(workload, similar[0], ties, next(slower, None))


_FASTEST = (
    ValueColumn("Workload", "text", lambda one: one.workload or None),
    ValueColumn("Kind", "text", lambda one: "sparse" if one.best.is_sparse else "exact"),
    ValueColumn("Tokens", "tokens", attrgetter("best.tokens")),
    ValueColumn("Density", "share", lambda one: one.best.density if one.best.is_sparse else None),
    ValueColumn("Fastest", "text", lambda one: name_ties(one.ties)),
    ValueColumn("Time", "seconds", lambda one: time_with_interval(one.best)),
    ValueColumn("Next", "text", lambda one: one.next and one.next.name),
    ValueColumn("Ratio", "ratio", lambda one: one.next and one.next.time_s / one.best.time_s),
)


# ---- sparse attention: the skipped share of the pairs, and the time saved ------------------------


def sparse(source: Source) -> Section:
    """Build a table per workload of the sparse rows, and charts of their speeds over dense."""
    rows = [row for row in source.rows if row.is_sparse]
    return Section(
        "Sparse and dilated attention",
        tables=source.tables(rows, _SPARSE),
        charts=_charts_over_dense(source, source.rows),
    )


MAX_LENGTHS = 4
"""Maximum number of lengths whose speeds over dense are drawn."""


def _charts_over_dense(source: Source, rows: Iterable[SweepRow]) -> list[Chart]:
    """Chart the speed over dense against the requested density, a chart per length.

    Only lengths with several densities are drawn.
    """
    # the sparsity of a plug-in may be a word
    rows = [r for r in rows if type(r.options.get("sparsity")) in (int, float)]
    by_length = sorted(group_by(rows, attrgetter("tokens")).items(), reverse=True)
    found = [c for _, some in by_length for c in source.charts(some, _speed_over_dense)]
    return found[:MAX_LENGTHS]


def _speed_over_dense(rows: Sequence[SweepRow], where: str) -> Chart | None:
    known = [r for r in rows if r.speed_over_dense]
    points = [Point(*_place(r), require(r.speed_over_dense)) for r in known]
    if len({p.x for p in points}) < 2:
        return None
    computed = any(r.dense_source != "measured" for r in known)
    where = join_words(at_length(where, rows[0].tokens), "dense time computed" if computed else "")
    failures = mark_failures(rows, _place)
    x, y = Axis("Requested density", "share", True), Axis("Speed over dense", "ratio", True)
    return build_chart("speed-over-dense", where, x, y, points, failures)


def _place(row: SweepRow) -> tuple[str, float]:
    """Return the name of a row without its sparsity, and the density that it leaves."""
    sparsity = row.options["sparsity"]
    name = row.name.replace(f" {label_option('sparsity', sparsity)}", "", 1)
    return name, round(1 - float(str(sparsity)), 9)


_SPARSE: Columns = (
    ValueColumn("Implementation", "text", attrgetter("name")),
    *split_names("tokens token_density plan_time_s time_s dense_time_s dense_source dense_kernel"),
    "speed_over_dense",
    ValueColumn(
        "Share of ideal",
        "share",
        lambda row: with_interval(row.share_of_ideal, row.share_low, row.share_high),
    ),
    *optional(SweepRow, "share_of_peak"),
)
