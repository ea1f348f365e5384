"""What holds a trial back, by measurement: memory, compute or communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from longseq_bench.analysis.row import require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.assemble import wanting
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table
from longseq_bench.reports.groups import capital, grouped, workload_words
from longseq_bench.reports.sections.findings import first_said, time_of

HALF = 0.5
"""Of the time: what takes more than this holds a pass back."""

_COLUMNS = (
    Column("Implementation"), Column("Ranks", "count"), Column("Tokens", "tokens"),
    Column("Time", "seconds"), Column("Compute only", "seconds"),
    Column("Communication only", "seconds"), Column("Exposed", "share"), Column("Bottleneck"),
    Column("By"),
)  # fmt: skip
_SAID = (
    "Of trials on several ranks. Communication where more than half of the time is what it adds to "
    "computing alone, compute where less is; either where the intervals leave both possible. Of a "
    "search: what the first failure lacked."
)


def bottleneck(source: Source) -> Section:
    """A row a trial or search on several ranks, with what held it back and how that is known."""
    tables, points = [], []
    for what, groups in (("", _swept(source)), ("longest lengths: ", _searched(source))):
        for title, rows in groups:
            words = f"{what}{title}"
            tables.append(Table(capital(words), _COLUMNS, tuple(rows)))
            counts = Counter(str(row[7]) for row in rows)
            told = ", ".join(f"{name} in {n}" for name, n in counts.most_common())
            points.append(f"Of {len(rows)} ({words}): {told}.")
    if not tables:
        return wanting(
            "Bottlenecks", "trial on several ranks whose communication was timed apart",
            "longseq sweep configs/parallel.yaml",
        )  # fmt: skip
    return Section("Bottlenecks", [_SAID], first_said(points), tables)


def _swept(source: Source) -> Iterator[tuple[str, list[tuple[Cell, ...]]]]:
    known = [r for r in source.rows if r.world_size > 1 and r.exposed_share is not None]
    for group in grouped(known):
        yield workload_words(group[0], source.machines), [_cells(row) for row in group]


def _cells(row: SweepRow) -> tuple[Cell, ...]:
    return (
        row.label, row.world_size, row.tokens, time_of(row), row.compute_time_s,
        row.communication_time_s, row.exposed_share, held_back(row),
        f"exposed {format_share(require(row.exposed_share))}{_unsure(row)}",
    )  # fmt: skip


def held_back(row: SweepRow) -> str:
    """Name what holds a row back, by the share of its time that communication adds."""
    if _is_either(row):
        return "either"
    return "communication" if require(row.exposed_share) > HALF else "compute"


def _unsure(row: SweepRow) -> str:
    if not _is_either(row):
        return ""
    low, high = require(row.exposed_low), require(row.exposed_high)
    return f" ({format_share(low)} to {format_share(high)})"


def _is_either(row: SweepRow) -> bool:
    low, high = row.exposed_low, row.exposed_high
    return low is not None and high is not None and low < HALF < high


def _searched(source: Source) -> Iterator[tuple[str, list[tuple[Cell, ...]]]]:
    found = [r for r in source.maxima if r.world_size > 1 and r.is_full_pass]
    for group in grouped(found):
        rows: list[tuple[Cell, ...]] = [
            (
                row.label, row.world_size, row.max_tokens or None, None, None, None, None,
                row.limited_by, _failure(row),
            )
            for row in group
        ]  # fmt: skip
        yield workload_words(group[0], source.machines), rows


def _failure(row: SearchRow) -> str:
    if row.first_failure is None:
        return "no longer length failed"
    phase = f" in {row.failure_phase}" if row.failure_phase else ""
    return f"{format_tokens(row.first_failure)} failed{phase}"
