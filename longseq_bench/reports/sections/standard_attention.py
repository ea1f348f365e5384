"""Memory against standard attention, which keeps its whole score matrix."""

from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import STANDARD
from longseq_bench.core.units import format_bytes, format_tokens
from longseq_bench.reports.base import SWEEP, Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Section
from longseq_bench.reports.sections.densities import SPARSITY, sparsity_of

_STANDARD: Columns = (
    "dense_peak_bytes", ValueColumn("Which is", "text", attrgetter("dense_memory_source")),
    ValueColumn("Times less", "ratio", attrgetter("memory_reduction")),
)  # fmt: skip
_BY_SPARSITY: Columns = (
    "label", "tokens", SPARSITY,
    ValueColumn("Sparsity of pairs", "share",
                lambda row: None if row.token_density is None else 1 - row.token_density),
    "time_s", "peak_bytes", *_STANDARD,
)  # fmt: skip
_EXPLANATION = (
    "Memory of standard attention: measured if the implementation dense ran on the same workload, "
    "else computed by formula: two score matrices and the floor; in training three score matrices "
    "and the tensors used with them."
)


def against_standard(source: Source) -> Section:
    """Build a table per workload of the rows on one rank whose peak is known."""
    known = [
        row
        for row in source.rows
        if row.memory_reduction is not None and row.implementation != STANDARD
    ]
    columns = ("label", "tokens", "peak_bytes", *_STANDARD)
    missing = "swept peak on one rank", SWEEP
    return _section("Memory against standard attention", known, columns, source, missing)


def by_sparsity(source: Source) -> Section:
    """Build a table per workload of the sparse rows on one rank whose peak is known."""
    known = [
        row
        for _, group in source.workloads(row for row in source.rows if "sparsity" in row.options)
        for row in sorted(group, key=lambda row: (row.tokens, sparsity_of(row)))
        if row.memory_reduction is not None
    ]
    missing = "peak of sparse attention on one rank", "longseq sweep configs/sparsity.yaml"
    return _section("Memory by sparsity", known, _BY_SPARSITY, source, missing)


def _section(
    title: str, rows: list[SweepRow], columns: Columns, source: Source, missing: tuple[str, str]
) -> Section:
    points = [_at_longest(group, where) for where, group in source.workloads(rows)]
    return Section(title, [_EXPLANATION], points, source.tables(rows, columns), missing=missing)


def _at_longest(group: list[SweepRow], where: str) -> str:
    tokens = max(row.tokens for row in group)
    at = sorted((r for r in group if r.tokens == tokens), key=lambda r: require(r.peak_bytes))
    ends = [f"{format_bytes(require(r.peak_bytes))} ({r.label})" for r in (at[0], at[-1])]
    return (
        f"At {format_tokens(tokens)} tokens{where}, peak memory "
        f"{' to '.join(dict.fromkeys(ends))}; standard attention takes "
        f"{format_bytes(require(at[0].dense_peak_bytes))} ({at[0].dense_memory_source})."
    )
