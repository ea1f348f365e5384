"""The first screen of the kind `summary`."""

from collections.abc import Iterator

from longseq_bench.analysis.labels import MAX_LABEL
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.reports import charts, key_figures, maxima_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Answer, Chart, KeyFigure
from longseq_bench.reports.groups import SHAPE, in_brackets, split_by_sparsity, table_key
from longseq_bench.reports.sections.at_a_glance import Overview, overview
from longseq_bench.reports.sections.findings import problems


def answer(source: Source) -> Answer:
    """Return the first screen: how far, how fast, in what memory; a line per implementation.

    Where no workload was run at all lengths of its shape, the lines are lengths.
    """
    found = overview(source)
    if best := found.best:
        shape = source.workload(best.rows[0], SHAPE)
        context = [f"Table and chart: {shape}, under any budget."] if shape else []
        return Answer(
            [*_reach(source, found), *filter(None, [key_figures.two_ranks(source, best.rows)])],
            [*problems(source)],
            best.chart(),
            best.table(),
            context,
        )
    return Answer(
        [*_figures(source, found)],
        [*problems(source)],
        _chart(found),
        found.table(source, MAX_ANSWER_ROWS),
        found.context(source),
    )


def _figures(source: Source, found: Overview) -> Iterator[KeyFigure]:
    figures: list[KeyFigure | None] = [*_reach(source, found)]
    timed = split_by_sparsity(row for row in found.at if row.is_ok)
    several = _has_both(source, found)
    for kind, rows in timed.items():
        figures.append(key_figures.fastest(f"Fastest{f', {kind}' * several}", rows))
    figures.append(key_figures.least_memory(found.at))
    if not any(figures):
        figures += map(key_figures.minimum_sparsity, source.minima[:2])
    return filter(None, figures)


def _reach(source: Source, found: Overview) -> Iterator[KeyFigure]:
    """Yield the longest lengths of searches, exact and sparse; without searches, of sweeps."""
    searched = _searched(source)
    figures = [] if searched else [key_figures.swept_end(found.swept)]
    for kind, rows in searched.items():
        label = f"Longest{f', {kind}' * _has_both(source, found)}"
        best = table_key(max(rows, key=lambda row: row.max_tokens))
        group = [row for row in rows if table_key(row) == best]
        is_stated = len(searched) == 1 and best == table_key(found.searched[0])
        figures.append(key_figures.longest(source, label, group, is_stated))
    yield from filter(None, figures)


def _searched(source: Source) -> dict[str, list[SearchRow]]:
    full = (row for row in source.maxima if row.is_full_pass and row.max_tokens)
    return split_by_sparsity(full)


def _has_both(source: Source, found: Overview) -> bool:
    """Return True if there are figures of exact and of sparse attention."""
    timed = split_by_sparsity(row for row in found.at if row.is_ok)
    return len({*timed, *_searched(source)}) > 1


def _chart(found: Overview) -> Chart | None:
    """Draw the times of the lines of the table; else their longest lengths; else the peaks."""
    lines = found.lines[:MAX_ANSWER_ROWS]
    timed = [line.timed for line in lines if line.timed]
    if chart := charts.time_of_best(found.swept, timed):
        return chart
    longest = (line.longest for line in lines if line.longest)
    named = {f"{one.row.name}{in_brackets(one.where)}": one.row for one in longest}
    short = {name: row for name, row in named.items() if len(name) <= MAX_LABEL}
    return maxima_charts.longest_bars(short) or charts.memory(found.at, "")
