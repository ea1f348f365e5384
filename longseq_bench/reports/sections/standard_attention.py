"""Memory against standard attention, which keeps its whole score matrix."""

from operator import attrgetter

from longseq_bench.analysis.sweeps import STANDARD
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
    "and the tensors used with them.",
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
    tables = source.tables(known, columns)
    return Section(
        "Memory against standard attention", _EXPLANATION, tables=tables, missing=missing
    )


def by_sparsity(source: Source) -> Section:
    """Build a table per workload of the sparse rows on one rank whose peak is known."""
    known = [
        row
        for _, group in source.workloads(row for row in source.rows if "sparsity" in row.options)
        for row in sorted(group, key=lambda row: (row.tokens, sparsity_of(row)))
        if row.memory_reduction is not None
    ]
    missing = "peak of sparse attention on one rank", "longseq sweep configs/sparsity.yaml"
    tables = source.tables(known, _BY_SPARSITY)
    return Section("Memory by sparsity", _EXPLANATION, tables=tables, missing=missing)
