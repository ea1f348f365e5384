"""The first screen of the kind `summary`."""

from collections.abc import Iterator

from longseq_bench.reports import key_figures, section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Answer, Chart, Finding, KeyFigure
from longseq_bench.reports.groups import split_by_sparsity, table_key
from longseq_bench.reports.sections.at_a_glance import Overview, most_shared, overview
from longseq_bench.reports.sections.findings import problems


def answer(source: Source) -> Answer:
    """Return the first screen: how far, how fast, in what memory; a line per implementation."""
    found = overview(source)
    return Answer(
        [*_figures(source, found)],
        [*problems(source), *describe_workloads(source, found)],
        _chart(source, found),
        found.table(source, MAX_ANSWER_ROWS),
    )


def _figures(source: Source, found: Overview) -> Iterator[KeyFigure]:
    full = [row for row in source.maxima if row.is_full_pass]
    timed = split_by_sparsity(row for row in found.at if row.is_ok)
    searched = split_by_sparsity(row for row in full if row.max_tokens)
    several = len({*timed, *searched}) > 1
    figures = []
    for kind, rows in searched.items():
        group = most_shared(rows)
        label = f"Longest{f', {kind}' * several}"
        is_stated = table_key(group[0]) == table_key(found.searched[0])
        figures.append(key_figures.longest(source, label, group, is_stated))
    if not searched:
        figures.append(key_figures.swept_end(found.swept))
    for kind, some in timed.items():
        figures.append(key_figures.fastest(f"Fastest{f', {kind}' * several}", some))
    figures.append(key_figures.least_memory(found.at))
    if not any(figures):
        figures += map(key_figures.minimum_sparsity, source.minima[:2])
    return filter(None, figures)


def describe_workloads(source: Source, found: Overview) -> Iterator[Finding]:
    """Name the workload of the times, and that of the longest lengths, where there are several."""
    of_times = source.workload(found.at[0]) if found.at else ""
    of_lengths = source.workload(found.searched[0]) if found.searched else ""
    if of_times:
        title = "All figures" if of_times == of_lengths else "Times and memory"
        yield Finding(f"{title}: {of_times}.", "Lengths swept")
    if of_lengths and of_lengths != of_times:
        yield Finding(f"Longest lengths: {of_lengths}.", "Longest lengths")


def _chart(source: Source, found: Overview) -> Chart | None:
    """Draw the times; if there are none, the longest lengths of the lines of the table."""
    lines = found.lines[:MAX_ANSWER_ROWS]
    if found.swept:
        timed = [line.timed for line in lines if line.timed]
        return section_charts.few_times(found.swept, timed)
    shared = {*map(id, found.searched)}
    rows = [line.longest.row for line in lines if line.longest and id(line.longest.row) in shared]
    return section_charts.maxima_bars(source, rows) if rows else None
