"""Memory against standard attention, which keeps its whole score matrix."""

from __future__ import annotations

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import STANDARD
from longseq_bench.core.units import format_bytes, format_tokens
from longseq_bench.reports.assemble import wanting
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table
from longseq_bench.reports.groups import capital, grouped, workload_words
from longseq_bench.reports.sections.findings import first_said

_COLUMNS = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Peak memory", "bytes"),
    Column("Standard attention's", "bytes"), Column("Which is"), Column("Times less", "ratio"),
)  # fmt: skip
_SAID = (
    "Peak memory beside that of standard attention on the same workload: measured where the "
    "implementation dense ran on it, else computed by formula from two score matrices beside the "
    "floor, in training three."
)


def beside_standard(source: Source) -> Section:
    """A table a workload of the rows on one rank whose peak is known."""
    known = [
        row
        for row in source.rows
        if row.memory_reduction is not None and row.implementation != STANDARD
    ]
    if not known:
        return wanting(
            "Memory against standard attention", "swept peak on one rank",
            "longseq sweep configs/quickstart.yaml",
        )  # fmt: skip
    tables, points = [], []
    for group in grouped(known):
        where = workload_words(group[0], source.machines)
        tables.append(Table(capital(where), _COLUMNS, tuple(map(_cells, group))))
        points.append(_at_longest(group, where))
    return Section("Memory against standard attention", [_SAID], first_said(points), tables)


def _cells(row: SweepRow) -> tuple[Cell, ...]:
    return (
        row.label, row.tokens, row.peak_bytes, row.dense_peak_bytes,
        row.dense_memory_source, row.memory_reduction,
    )  # fmt: skip


def _at_longest(group: list[SweepRow], where: str) -> str:
    """What the longest length of a workload takes, beside what standard attention does there."""
    tokens = max(row.tokens for row in group)
    at = sorted((r for r in group if r.tokens == tokens), key=lambda r: require(r.peak_bytes))
    ends = [f"{format_bytes(require(r.peak_bytes))} ({r.label})" for r in (at[0], at[-1])]
    took = ends[0] if len(at) == 1 else f"of {len(at)} the least {ends[0]}, the most {ends[1]}"
    return (
        f"At {format_tokens(tokens)} tokens ({where}), where standard attention takes "
        f"{format_bytes(require(at[0].dense_peak_bytes))} ({at[0].dense_memory_source}): {took}."
    )
