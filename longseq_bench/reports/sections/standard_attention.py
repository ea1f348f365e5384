"""Memory against standard attention, which keeps its whole score matrix."""

from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import STANDARD
from longseq_bench.core.units import format_bytes, format_tokens
from longseq_bench.reports.assemble import SWEEP, or_missing
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import group_by_workload

STANDARD_MEMORY: Columns = (
    "dense_peak_bytes", ValueColumn("Which is", "text", attrgetter("dense_memory_source")),
    ValueColumn("Times less", "ratio", attrgetter("memory_reduction")),
)  # fmt: skip
_SAID = (
    "Peak memory beside that of standard attention on the same workload: measured where the "
    "implementation dense ran on it, else computed by formula from two score matrices beside the "
    "floor, in training three."
)


def beside_standard(source: Source) -> Section:
    """Build a table per workload of the rows on one rank whose peak is known."""
    known = [
        row
        for row in source.rows
        if row.memory_reduction is not None and row.implementation != STANDARD
    ]
    tables = source.tables(known, ("label", "tokens", "peak_bytes", *STANDARD_MEMORY))
    points = [_at_longest(group, source.workload(group[0])) for group in group_by_workload(known)]
    section = Section("Memory against standard attention", [_SAID], points, tables)
    return or_missing(section, "swept peak on one rank", SWEEP)


def _at_longest(group: list[SweepRow], where: str) -> str:
    """Compare memory at the longest length of a workload with standard attention's."""
    tokens = max(row.tokens for row in group)
    at = sorted((r for r in group if r.tokens == tokens), key=lambda r: require(r.peak_bytes))
    ends = [f"{format_bytes(require(r.peak_bytes))} ({r.label})" for r in (at[0], at[-1])]
    took = ends[0] if len(at) == 1 else f"of {len(at)} the least {ends[0]}, the most {ends[1]}"
    return (
        f"At {format_tokens(tokens)} tokens ({where}), where standard attention takes "
        f"{format_bytes(require(at[0].dense_peak_bytes))} ({at[0].dense_memory_source}): {took}."
    )
