"""Sparse attention: the skipped share of the pairs, and the time saved by it."""

from collections.abc import Sequence
from operator import attrgetter

from longseq_bench.analysis.row import require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share
from longseq_bench.reports import section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, ValueColumn, build_table
from longseq_bench.reports.document import Section
from longseq_bench.reports.groups import group_by_workload, has_several_ranks, longest_shared
from longseq_bench.reports.wording import join_ties

_EXPLANATION = (
    "Density: kept share of the visible blocks (or pairs, for patterns without blocks). Density of "
    "pairs: a pair computed twice counts twice.",
    "Dense time: torch's dense attention on the same inputs, in turn with the sparse passes. Share "
    "of ideal: dense time times the density of the work divided by the time; 100 %: skipped work "
    "costs nothing.",
    "Preparation time: not part of Time, except for patterns that depend on the inputs. Memory "
    "reduction: peak of standard attention divided by the row's peak.",
)
_ONE_RANK = "Dense time and memory reduction are known on one rank only."


def sparse(source: Source) -> Section:
    """Build a table of the highest shares of ideal, then one per workload of the sparse rows."""
    rows = [row for row in source.rows if row.is_sparse]
    shares = group_by_workload(row for row in rows if row.share_of_ideal is not None)
    best = [ordered for group in shares if len(ordered := _order(group)) > 1]
    columns = (ValueColumn("Workload", "text", lambda rows: source.workload(rows[0]) or None),)
    tables = [build_table("Highest share of ideal", (*columns, *_BEST), best)] if best else []
    return Section(
        "Sparse attention",
        [*_EXPLANATION, *[_ONE_RANK] * has_several_ranks(rows)],
        tables=[*tables, *source.tables(rows, _COLUMNS)],
        charts=section_charts.share_of_ideal(source, rows),
    )


def _order(group: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the rows of the longest length that several have, the highest share first."""
    return sorted(longest_shared(group), key=lambda row: -require(row.share_of_ideal))


def _share_words(row: SweepRow) -> str | None:
    """Return the share of ideal, with its bounds if they are known."""
    if row.share_of_ideal is None:
        return None
    share = format_share(row.share_of_ideal)
    if row.share_low is None:
        return share
    return f"{share} ({format_share(row.share_low)} to {format_share(require(row.share_high))})"


_BEST = (
    ValueColumn("Tokens", "tokens", lambda rows: rows[0].tokens),
    ValueColumn("Compared", "count", len),
    ValueColumn(
        "Highest (≈: no significant difference)", "text",
        lambda rows: join_ties(rows, "share_low", "share_high", largest=True),
    ),
    ValueColumn("Share of ideal", "text", lambda rows: _share_words(rows[0])),
    ValueColumn("Density of pairs", "share", lambda rows: rows[0].token_density),
    ValueColumn("Speed over dense", "ratio", lambda rows: rows[0].speed_over_dense),
    ValueColumn("Next", "text", lambda rows: rows[1].name),
    ValueColumn("Its share of ideal", "text", lambda rows: _share_words(rows[1])),
)  # fmt: skip
_COLUMNS: Columns = (
    ValueColumn("Implementation", "text", attrgetter("name")), "tokens", "status", "density_asked",
    "density_achieved", "token_density", "uncovered", "plan_time_s", "time_s", "effective_flops",
    "dense_time_s", "dense_source", "speed_over_dense",
    ValueColumn("Share of ideal", "text", _share_words), "peak_bytes", "memory_reduction",
    ValueColumn("Source of standard memory", "text",
                lambda row: None if row.memory_reduction is None else row.dense_memory_source),
)  # fmt: skip
