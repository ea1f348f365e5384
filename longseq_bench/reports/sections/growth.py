"""Growth of maxima and times with tokens and ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import Exponent, complexities, maxima_on_ranks
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.core.cost import ratio
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import (
    MAX_TABLES,
    Axis,
    Chart,
    Guide,
    Mark,
    Point,
    Section,
    Table,
    build_chart,
)
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections.lengths import MAX_TOKENS, passed_none


def over_ranks(source: Source) -> Section:
    """Build a table per workload of longest lengths over ranks, with theory."""
    groups = [
        group
        for group in group_by_workload(source.maxima)
        if len({row.world_size for row in group}) > 1
    ]
    groups.sort(key=len, reverse=True)
    return Section(
        "Longest lengths over ranks",
        tables=[_over_ranks_table(source, group) for group in groups],
        charts=source.charts(source.maxima, _chart_over_ranks),
    )


def _over_ranks_table(source: Source, maxima: Sequence[SearchRow]) -> Table:
    """Return the table of longest lengths of one workload over ranks, the farthest series first."""
    series = group_by(maxima_on_ranks(maxima), attrgetter("label")).values()
    ordered = sorted(series, key=lambda some: -max(one.actual for one in some))
    one_rank = {row.label: row.max_tokens for row in maxima if row.world_size == 1}
    times = ValueColumn(
        "Times as long", "ratio", lambda one: ratio(one.actual, one_rank.get(one.label))
    )
    columns = (*_OVER_RANKS, times, ValueColumn("Limited by", "text", attrgetter("limited_by")))
    scaled = [one for some in ordered for one in some]
    return build_table(source.title(maxima[0]), columns, scaled)


def _chart_over_ranks(rows: Sequence[SearchRow], where: str) -> Chart | None:
    """Chart longest lengths against ranks, of implementations that were searched on several.

    The guide is the longest on one rank times the ranks.
    """
    several = {row.label for row in rows if row.world_size > 1}
    rows = [row for row in rows if row.label in several]
    points = [Point(r.label, r.world_size, r.max_tokens) for r in rows if r.max_tokens]
    failures = [Mark(r.label, r.world_size, "no length passed") for r in rows if passed_none(r)]
    worlds = {p.x for p in points} | {m.x for m in failures}
    if len(worlds) < 2:
        return None
    alone = max((p.y for p in points if p.x == 1), default=0.0)
    ends = (min(worlds), max(worlds)) if alone else ()
    guide = Guide("ideal: one rank × ranks", tuple(Point("", x, x * alone) for x in ends))
    x, y = Axis("Ranks", "count", log=True), replace(MAX_TOKENS, log=True)
    name, title = "maxima-over-ranks", "Longest lengths against ranks"
    return build_chart(name, where, x, y, points, failures, guide, title=title)


def exponents(source: Source) -> Section:
    """Build a table of fitted exponents per workload."""
    explanation = [
        "Power laws in tokens and ranks are fitted to the logarithms of median times and of peaks "
        "of a rank. A dash: ranks did not vary, or varied with tokens. Ranks on a CPU share its "
        "cores, so more ranks may not be faster."
    ]
    groups = ((group, complexities(group)) for group in group_by_workload(source.rows))
    found = list(islice((one for one in groups if one[1]), MAX_TABLES + 1))
    found.sort(key=lambda one: (-max(fit.points for fit in one[1]), -len(one[1])))
    tables = [build_table(source.title(group[0]), _EXPONENTS, fits) for group, fits in found]
    return Section("How time and memory grow", explanation, tables=tables)


def _format_exponent(one: Exponent | None) -> str | None:
    if one is None:
        return None
    if one.low is None or one.high is None:
        return _format_formula(one.value)
    return f"{one.value:z.2f} ({one.low:z.2f} to {one.high:z.2f})"


def _format_formula(value: float | None) -> str | None:
    return None if value is None else f"{value:z.2f}"


_OVER_RANKS = (
    ValueColumn("Implementation", "text", attrgetter("label")),
    ValueColumn("Ranks", "count", attrgetter("world_size")),
    ValueColumn("Floor", "tokens", attrgetter("theory")),
    ValueColumn("Expected", "tokens", attrgetter("expected")),
    ValueColumn("Max tokens", "tokens", attrgetter("actual")),
    ValueColumn("Of expected", "share", lambda one: one.expected and one.actual / one.expected),
)
_EXPONENTS = (
    ValueColumn("Implementation", "text", attrgetter("label")),
    ValueColumn("Of", "text", attrgetter("quantity")),
    ValueColumn("Tokens ^", "text", lambda one: _format_exponent(one.tokens)),
    ValueColumn("By formula", "text", lambda one: _format_formula(one.formula_tokens)),
    ValueColumn("Ranks ^", "text", lambda one: _format_exponent(one.ranks)),
    ValueColumn("By formula", "text", lambda one: _format_formula(one.formula_ranks)),
    ValueColumn("Points", "count", attrgetter("points")),
)
