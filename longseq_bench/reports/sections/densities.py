"""Longest length per sparsity, and minimum sparsity per length."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.grouping import group_by
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Cell, Column, Section, Table
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.growth import minimum_sparsity

_LENGTHS = (
    Column("Implementation"), Column("Ranks", "count"), Column("Sparsity"),
    Column("Longest ok", "tokens"), Column("First failure", "tokens"), Column("Failed by"),
    Column("Known by"), Column("Runs", "count"),
)  # fmt: skip


_SPEEDS: Columns = (
    "label", "tokens", "token_density", "time_s", "dense_time_s", "dense_source",
    "speed_over_dense",
)  # fmt: skip


def speed_over_dense(source: Source) -> Section:
    """Build a table and a map per workload of the speed over dense attention."""
    rows = [row for row in source.rows if row.speed_over_dense and "sparsity" in row.options]
    candidates = [row for row in source.rows if "sparsity" in row.options]
    explanation = (
        "Time of torch's dense attention on the same inputs divided by the row's time. Source: "
        "measured, or computed from some of its rows where a whole pass was too long."
    )
    return Section(
        "Speed over dense attention",
        [explanation],
        tables=source.tables(rows, _SPEEDS),
        charts=section_charts.charts(source, candidates, section_charts.speed_over_dense),
        missing=("sweep with an option sparsity", "longseq sweep configs/sparsity.yaml"),
    )


def against_length(source: Source) -> Section:
    """Build the section on the longest length per sparsity, and the minimum sparsity per length."""
    tables, minimum = list(_lengths(source)), minimum_sparsity(source)
    explanation = (
        "Longest ok: the maximum of a search, or the longest ok length of a sweep (lengths between "
        "the swept ones were not tried). First failure: the shortest failed length above."
    )
    tables += minimum.tables
    sparse = [row for row in source.rows if row.is_sparse]
    return Section(
        "Sparsity against length",
        [explanation, *(minimum.paragraphs if minimum.tables else [])],
        tables=tables,
        charts=section_charts.share_of_ideal(source, sparse) if tables else (),
        missing=(
            "search or sweep with an option sparsity",
            "longseq maxlen --impl block-sparse -o sparsity=0.99",
            "longseq maxlen --impl block-sparse --sparsity auto --target 1M",
        ),
    )


def _lengths(source: Source) -> Iterator[Table]:
    searched = (row for row in source.maxima if "sparsity" in row.options and row.is_full_pass)
    for maxima in group_by_workload(searched):
        rows = [
            _cells(r, r.max_tokens or None, r.first_failure, r.limited_by, "search", r.runs)
            for r in _by_sparsity(maxima)
        ]
        yield Table(source.title(maxima[0], start="By search"), _LENGTHS, tuple(rows))
    for group in group_by_workload(row for row in source.rows if "sparsity" in row.options):
        series = group_by(_by_sparsity(group), attrgetter("label", "world_size")).values()
        rows = [_cells(some[0], *_bracket(some), "sweep", None) for some in series]
        yield Table(source.title(group[0], start="Swept"), _LENGTHS, tuple(rows))


def _by_sparsity(rows: Iterable[R]) -> list[R]:
    return sorted(rows, key=lambda row: (row.implementation, sparsity_of(row)))


def _cells(row: Row, *cells: Cell) -> tuple[Cell, ...]:
    return (row.label, row.world_size, SPARSITY.value(row), *cells)


def _bracket(rows: Sequence[SweepRow]) -> tuple[int | None, int | None, str | None]:
    """Return the longest length that was ok, the shortest failed one above it, and its status."""
    ok = max((r.tokens for r in rows if r.status == "ok"), default=None)
    failed = [r for r in rows if r.status != "ok" and r.tokens > (ok or 0)]
    first = min(failed, key=attrgetter("tokens"), default=None)
    return (ok, first.tokens, first.status) if first else (ok, None, None)


def sparsity_of(row: Row) -> float:
    """Return the sparsity that a row's options request."""
    return float(str(row.options["sparsity"]))


SPARSITY = ValueColumn("Sparsity", "text", lambda row: f"{sparsity_of(row):.6g}")
