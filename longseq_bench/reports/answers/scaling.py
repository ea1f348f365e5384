"""The first screen of the kind `scaling`: growth with ranks and length, and the limit."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.scaling import Complexity, RankScaling, complexities, maxima_on_ranks
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share
from longseq_bench.reports import charts, maxima_charts
from longseq_bench.reports.answers.devices import table_of
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import Columns, build_table
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    Answer,
    Chart,
    Finding,
    KeyFigure,
    Table,
    format_ratio,
)
from longseq_bench.reports.groups import SAME_TABLE, group_by_workload
from longseq_bench.reports.sections import bottleneck, growth
from longseq_bench.reports.sections.multi_rank import find_compared, find_over_ranks
from longseq_bench.reports.wording import format_range

TITLE = "Scaling"


def answer(source: Source) -> Answer:
    """Describe growth with ranks and with length: of searches, else of sweeps."""
    maxima = find_over_ranks(source)
    scaled = maxima_on_ranks(maxima)
    group, fits = _find_fits(source)
    table: Table | None
    if maxima:
        drawn = maxima_charts.over_ranks(source, maxima)
        table = growth.over_ranks_table(source, maxima, MAX_ANSWER_ROWS)
    else:
        drawn = list(_sweep_charts(source, group, fits))
        table = _table_of_sweeps(source, group, fits)
    where = _describe_difference(source, group[0], maxima[0]) if group and maxima else ""
    figures = [*_growth(scaled), *_exponent(fits, where), *_limit(source, scaled)]
    return Answer(figures, list(_findings(scaled)), next(iter(drawn), None), table)


def _describe_difference(source: Source, row: Row, shown: Row) -> str:
    """Describe what the workload of a row has that of the shown one does not have."""
    fields = [name for name in SAME_TABLE if getattr(row, name) != getattr(shown, name)]
    return source.workload(row, fields)


def _find_fits(source: Source) -> tuple[list[SweepRow], list[Complexity]]:
    """Return the rows and fits of time of the workload with the fits of most points, or most fits.

    The fit with most points is first; of equal ones exact attention, then the narrowest interval.
    """
    found: list[tuple[list[SweepRow], list[Complexity]]] = []
    for group in group_by_workload(source.rows):
        fits = [fit for fit in complexities(group) if fit.quantity == "time" and fit.tokens]
        sparse = {row.label for row in group if row.is_sparse}
        if fits:
            fits.sort(key=lambda fit: (-fit.points, fit.label in sparse, _width(fit)))
            found.append((group, fits))
    return max(found, key=lambda one: (one[1][0].points, len(one[1])), default=([], []))


def _width(fit: Complexity) -> float:
    """Return the width of the interval of the exponent of tokens."""
    one = require(fit.tokens)
    return math.inf if one.low is None or one.high is None else one.high - one.low


def _growth(scaled: Sequence[RankScaling]) -> Iterator[KeyFigure]:
    """Describe the growth of the longest length with ranks, of the series that reaches farthest."""
    passed = group_by((one for one in scaled if one.actual), attrgetter("label")).values()
    series = [some for some in passed if len(some) > 1]
    if not series:
        return
    first, *_, last = max(series, key=lambda some: some[-1].actual)
    doublings = math.log2(last.world_size / first.world_size)
    limits = " then ".join(dict.fromkeys(str(one.limited_by) for one in (first, last)))
    words = f"{last.label}, {first.world_size} to {last.world_size} ranks, {limits} limit"
    rate = (last.actual / first.actual) ** (1 / doublings)
    yield KeyFigure("Tokens per doubling of ranks", format_ratio(rate), words)


def _exponent(fits: Sequence[Complexity], where: str) -> Iterator[KeyFigure]:
    """Describe the first fit of time over length.  where: its workload, if not of the chart."""
    if fits:
        best = fits[0]
        value = growth.format_exponent(best.tokens)
        unsure = "" if math.isfinite(_width(best)) else "no interval"
        words = ", ".join(filter(None, (best.label, f"{best.points} points", unsure, where)))
        yield KeyFigure("Exponent of time over length", str(value), words)


def _limit(source: Source, scaled: Sequence[RankScaling]) -> Iterator[KeyFigure]:
    """Name the most frequent limit of searches over ranks, else bottleneck of trials, or limit."""
    timed = bottleneck.find_timed(source)
    kind = "searches shown" if scaled else "trials on several ranks" if timed else "searches"
    causes = Counter(str(one.limited_by) for one in scaled or ([] if timed else source.maxima))
    causes.update(() if scaled else map(bottleneck.find_bottleneck, timed))
    for cause, count in causes.most_common(1):
        yield KeyFigure("Limit", cause, f"in {count:,} of {causes.total():,} {kind}")


def _findings(scaled: Sequence[RankScaling]) -> Iterator[Finding]:
    several = [one for one in scaled if one.world_size > 1 and one.actual]
    shares = [one.actual / one.expected for one in several if one.expected]
    if shares:
        ends = format_range(shares, format_share)
        words = f"Measured lengths are {ends} of the expected ones, one rank × ranks."
        yield Finding(words, growth.OVER_RANKS_TITLE)
    shares = [one.actual / one.theory for one in several if one.theory]
    if shares:
        words = f"They are {format_range(shares, format_share)} of the theoretical maximum."
        yield Finding(words.replace("They", "Measured lengths"), growth.OVER_RANKS_TITLE)


def _table(source: Source, row: Row, columns: Columns, items: Sequence[object]) -> Table:
    return build_table(source.title(row), columns, items[:MAX_ANSWER_ROWS], keep_empty=True)


def _table_of_sweeps(
    source: Source, fitted: Sequence[SweepRow], fits: Sequence[Complexity]
) -> Table | None:
    """Return the table of fits, else that of speed-ups."""
    if fits:
        return _table(source, fitted[0], growth.EXPONENTS, fits)
    compared = find_compared(source)
    return table_of(source, compared) if compared else None


def _sweep_charts(
    source: Source, group: Sequence[SweepRow], fits: Sequence[Complexity]
) -> Iterator[Chart]:
    """Yield the chart of time over length of the fits in the table, and that of speed-ups."""
    labels = {fit.label for fit in fits[:MAX_ANSWER_ROWS]}
    fitted, compared = [row for row in group if row.label in labels], find_compared(source)
    drawn = (
        charts.time(fitted, source.workload(fitted[0])) if fitted else None,
        charts.speedups(compared, source.workload(compared[0])) if compared else None,
    )
    yield from filter(None, drawn)
