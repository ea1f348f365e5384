"""Sparse attention: the skipped share of the pairs, and the time saved by it."""

from collections.abc import Sequence
from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share, format_tokens
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn
from longseq_bench.reports.document import Section, format_ratio
from longseq_bench.reports.groups import has_several_ranks, longest_shared
from longseq_bench.reports.wording import describe_best, find_ties, limit_findings

_EXPLANATION = (
    "Density: kept share of the visible blocks (or pairs, for patterns without blocks). Density of "
    "pairs: a pair computed twice counts twice. Preparation time: not part of Time, except for "
    "patterns that depend on the inputs. Dense time: torch's dense attention on the same inputs, "
    "in turn with the sparse passes; computed from some of its rows if a pass would take too long. "
    "Share of ideal: dense time times the density of the work divided by the time, with its "
    "interval; 100 %: skipped work costs nothing. Memory reduction: peak of standard attention "
    "divided by the row's peak."
)
_ONE_RANK = "Dense time and memory reduction are known on one rank only."


def sparse(source: Source) -> Section:
    """Build a table per workload of the sparse rows, after a sentence on the best one."""
    rows = [row for row in source.rows if row.is_sparse]
    shares = [row for row in rows if row.share_of_ideal is not None]
    points = [_best(group, where) for where, group in source.workloads(shares)]
    return Section(
        "Sparse attention",
        [_EXPLANATION, *[_ONE_RANK] * has_several_ranks(rows)],
        limit_findings(points),
        source.tables(rows, _COLUMNS),
        charts=section_charts.share_of_ideal(source, rows),
    )


def _share_words(row: SweepRow) -> str | None:
    """Return the share of ideal, with its bounds if they are known."""
    if row.share_of_ideal is None:
        return None
    share = format_share(row.share_of_ideal)
    if row.share_low is None:
        return share
    return f"{share} ({format_share(row.share_low)} to {format_share(require(row.share_high))})"


def _best(group: Sequence[SweepRow], where: str) -> str:
    """Name the highest share of ideal, at the longest length where several rows have one."""
    rows = sorted(longest_shared(group), key=lambda row: -require(row.share_of_ideal))
    at = f"At {format_tokens(rows[0].tokens)} tokens{where}"
    if len(rows) == 1:
        return f"{at}, only {_words(rows[0])} has a share of ideal."
    if rows[0].share_low is None:
        best = describe_best(rows, rows[:1], ("has the highest share of ideal", ""), _words)
        return f"{at}, {best}; the first is of a single pass, so its uncertainty is unknown."
    verbs = "reaches the highest share of ideal", "reach the highest share of ideal"
    ties = find_ties(rows, "share_low", "share_high", largest=True)
    return f"{at}, {describe_best(rows, ties, verbs, _words)}."


def _words(row: SweepRow) -> str:
    """Name a row with its share, speed and density, and the source of the dense time."""
    faster = format_ratio(require(row.speed_over_dense))
    known = "" if row.dense_source == "measured" else f", dense time {row.dense_source}"
    return (
        f"{row.name} ({format_share(require(row.share_of_ideal))}: {faster} as fast as dense at a "
        f"density of {format_share(require(row.token_density))}{known})"
    )


_COLUMNS: Columns = (
    ValueColumn("Implementation", "text", attrgetter("name")), "tokens", "status", "density_asked",
    "density_achieved", "token_density", "uncovered", "plan_time_s", "time_s", "effective_flops",
    "dense_time_s", "dense_source", "speed_over_dense",
    ValueColumn("Share of ideal", "text", _share_words), "peak_bytes", "memory_reduction",
    ValueColumn("Source of standard memory", "text",
                lambda row: None if row.memory_reduction is None else row.dense_memory_source),
)  # fmt: skip
