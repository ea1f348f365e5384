"""Sparsity against length and against memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from longseq_bench.analysis.row import R, Row, require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table, format_cell
from longseq_bench.reports.fields import TableField, computed, rows_table
from longseq_bench.reports.groups import capitalize_first, group_by_workload
from longseq_bench.reports.sections.findings import limit_sentences
from longseq_bench.reports.sections.growth import least_sparse

_LENGTHS = (
    Column("Implementation"), Column("Ranks", "count"), Column("Sparsity"),
    Column("Longest ok", "tokens"), Column("First failure", "tokens"), Column("Failed by"),
    Column("Known by"), Column("Runs", "count"),
)  # fmt: skip
_MEMORY = (
    "label", "tokens", computed("Sparsity", "text", lambda row: _sparsity(row)),
    computed("Sparsity of pairs", "share",
             lambda row: None if row.token_density is None else 1 - row.token_density),
    "time_s", "peak_bytes", "dense_peak_bytes", TableField("dense_memory_source", "Which is"),
    TableField("memory_reduction", "Times less"),
)  # fmt: skip


def against_length(source: Source) -> Section:
    """Build the section on the longest length per sparsity, and the least sparsity per length."""
    tables = [
        Table(capitalize_first(title), _LENGTHS, tuple(rows))
        for title, rows in _lengths(source)
        if rows
    ]
    least = least_sparse(source)
    if not tables and not least.tables:
        return missing_section(
            "Sparsity against length", "sparse attention with a sparsity of its own",
            "longseq maxlen --impl block-sparse -o sparsity=0.99",
            "longseq maxlen --impl block-sparse --sparsity auto --target 1M",
        )  # fmt: skip
    said = [
        "Longest ok is a search's maximum, or the longest length of a sweep that was ok; lengths "
        "between those of a sweep were not tried. First failure is the shortest failed one above."
    ]
    return Section(
        "Sparsity against length",
        [*said, *(least.paragraphs if least.tables else [])],
        tables=[*tables, *least.tables],
        charts=section_charts.shares(source, [r for r in source.rows if r.is_sparse]),
    )


def _lengths(source: Source) -> Iterator[tuple[str, list[tuple[Cell, ...]]]]:
    for searched in group_by_workload(row for row in source.maxima if "sparsity" in row.options):
        rows = [_searched(row) for row in _by_sparsity(searched) if row.is_full_pass]
        yield f"{source.workload(searched[0])}, by search", rows
    for group in group_by_workload(row for row in source.rows if "sparsity" in row.options):
        series: dict[tuple[str, int], list[SweepRow]] = defaultdict(list)
        for row in _by_sparsity(group):
            series[row.label, row.world_size].append(row)
        rows = [_swept(some) for some in series.values()]
        yield f"{source.workload(group[0])}, swept", rows


def _by_sparsity(rows: Iterable[R]) -> list[R]:
    return sorted(rows, key=lambda r: (r.implementation, float(str(r.options["sparsity"]))))


def _searched(row: SearchRow) -> tuple[Cell, ...]:
    return (
        row.label, row.world_size, _sparsity(row), row.max_tokens or None,
        row.first_failure, row.limited_by, "search", row.runs,
    )  # fmt: skip


def _swept(rows: Sequence[SweepRow]) -> tuple[Cell, ...]:
    ok = max((r.tokens for r in rows if r.status == "ok"), default=None)
    failed = [r for r in rows if r.status != "ok" and r.tokens > (ok or 0)]
    first = min(failed, key=lambda r: int(r.tokens), default=None)
    return (
        rows[0].label, rows[0].world_size, _sparsity(rows[0]), ok,
        first.tokens if first else None, first.status if first else None, "sweep", None,
    )  # fmt: skip


def _sparsity(row: Row) -> str | None:
    asked = row.options.get("sparsity")
    return None if asked is None else f"{float(str(asked)):.6g}"


def against_memory(source: Source) -> Section:
    """Build the section on peak memory by sparsity, with standard attention's."""
    known = [
        r
        for r in source.rows
        if "sparsity" in r.options and r.status == "ok" and r.memory_reduction is not None
    ]
    if not known:
        return missing_section(
            "Memory by sparsity", "peak of sparse attention on one rank",
            "longseq sweep configs/sparsity.yaml",
        )  # fmt: skip
    tables: list[Table] = []
    points: list[str] = []
    for group in group_by_workload(known):
        where = source.workload(group[0])
        ordered = sorted(group, key=lambda r: (r.tokens, float(str(r.options["sparsity"]))))
        tables.append(rows_table(ordered, source, _MEMORY))
        points += _least_and_most(ordered, where)
    said = [
        "Standard attention's memory is measured where the implementation dense ran on the same "
        "workload, else computed by formula."
    ]
    return Section("Memory by sparsity", said, limit_sentences(points), tables)


def _least_and_most(rows: Sequence[SweepRow], where: str) -> Iterator[str]:
    """Compare peaks at the longest length: skipping saves time, not memory of tensors."""
    at = [r for r in rows if r.tokens == rows[-1].tokens]
    least, most = (of(at, key=lambda r: require(r.peak_bytes)) for of in (min, max))
    ratio = format_cell(require(most.peak_bytes) / require(least.peak_bytes), "ratio")
    if ratio != format_cell(1.0, "ratio"):
        yield (
            f"At {format_tokens(at[0].tokens)} tokens ({where}) the largest peak of {len(at)} "
            f"rows, {most.label}, is {ratio} the least, {least.label}."
        )
