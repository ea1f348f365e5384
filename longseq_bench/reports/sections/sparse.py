"""Sparse attention: the skipped share of the pairs, and the time saved."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from longseq_bench.analysis.labels import label_option
from longseq_bench.analysis.row import require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, with_interval
from longseq_bench.reports.document import Axis, Chart, Point, Section, build_chart
from longseq_bench.reports.groups import at_length, join_words, split_names
from longseq_bench.reports.sections.lengths import mark_failures


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
    "share_of_peak",
)
