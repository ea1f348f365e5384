"""Bottlenecks by measurement: memory, compute or communication."""

from collections import Counter
from collections.abc import Iterable

from longseq_bench.analysis.row import require
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports.assemble import missing_section
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Section
from longseq_bench.reports.fields import TableField, computed, rows_table
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.findings import limit_sentences

HALF = 0.5
"""Share of the time above which communication is the bottleneck."""

_COLUMNS: tuple[str | TableField, ...] = (
    "label", "world_size", "tokens", "time_s", "compute_time_s", "communication_time_s",
    "exposed_share", computed("Bottleneck", "text", lambda row: find_bottleneck(row)),
    computed("By", "text", lambda row: f"exposed {format_share(row.exposed_share)}{_unsure(row)}"),
)  # fmt: skip
_SEARCHED: tuple[str | TableField, ...] = (
    "label", "world_size", computed("Tokens", "tokens", lambda row: row.max_tokens or None),
    *(computed(heading, "seconds", lambda row: None)
      for heading in ("Time", "Compute only", "Communication only")),
    computed("Exposed", "share", lambda row: None),
    TableField("limited_by", "Bottleneck"), computed("By", "text", lambda row: _failure(row)),
)  # fmt: skip
_SAID = (
    "Of trials on several ranks. Communication where more than half of the time is what it adds to "
    "computing alone, compute where less is; either where the intervals leave both possible. Of a "
    "search: what the first failure lacked."
)


def bottleneck(source: Source) -> Section:
    """Build a row per trial or search on several ranks: its bottleneck, and the evidence."""
    swept = [r for r in source.rows if r.world_size > 1 and r.exposed_share is not None]
    searched = [r for r in source.maxima if r.world_size > 1 and r.is_full_pass]
    tables, points = [], []
    for group in group_by_workload(swept):
        tables.append(rows_table(group, source, _COLUMNS))
        words = source.workload(group[0])
        points.append(_count_by(map(find_bottleneck, group), words))
    for maxima in group_by_workload(searched):
        tables.append(rows_table(maxima, source, _SEARCHED, "longest lengths: "))
        words = f"longest lengths: {source.workload(maxima[0])}"
        points.append(_count_by((str(row.limited_by) for row in maxima), words))
    if not tables:
        return missing_section(
            "Bottlenecks", "trial on several ranks whose communication was timed apart",
            "longseq sweep configs/parallel.yaml",
        )  # fmt: skip
    return Section("Bottlenecks", [_SAID], limit_sentences(points), tables)


def _count_by(found: Iterable[str], workload: str) -> str:
    counts = Counter(found)
    told = ", ".join(f"{name} in {n}" for name, n in counts.most_common())
    return f"Of {counts.total()} ({workload}): {told}."


def find_bottleneck(row: SweepRow) -> str:
    """Name the bottleneck of a row, by the share of its time that communication adds."""
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


def _failure(row: SearchRow) -> str:
    if row.first_failure is None:
        return "no longer length failed"
    phase = f" in {row.failure_phase}" if row.failure_phase else ""
    return f"{format_tokens(row.first_failure)} failed{phase}"
