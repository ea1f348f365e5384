"""Memory against standard attention, which keeps its whole score matrix."""

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import STANDARD
from longseq_bench.core.units import format_bytes, format_tokens
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Section
from longseq_bench.reports.fields import TableField, rows_table
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.findings import limit_sentences

_COLUMNS = (
    "label", "tokens", "peak_bytes", "dense_peak_bytes",
    TableField("dense_memory_source", "Which is"), TableField("memory_reduction", "Times less"),
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
    if not known:
        return missing_section(
            "Memory against standard attention", "swept peak on one rank",
            "longseq sweep configs/quickstart.yaml",
        )  # fmt: skip
    tables, points = [], []
    for group in group_by_workload(known):
        where = source.workload(group[0])
        tables.append(rows_table(group, source, _COLUMNS))
        points.append(_at_longest(group, where))
    return Section("Memory against standard attention", [_SAID], limit_sentences(points), tables)


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
