"""The first screen of the kind `summary`."""

from collections.abc import Iterator

from longseq_bench.analysis.short_labels import MAX_LABEL
from longseq_bench.reports import key_figures, section_charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import MAX_ANSWER_ROWS, Answer, Chart, KeyFigure
from longseq_bench.reports.groups import in_brackets, split_by_sparsity, table_key
from longseq_bench.reports.sections.at_a_glance import Overview, overview
from longseq_bench.reports.sections.findings import problems


def answer(source: Source) -> Answer:
    """Return the first screen: how far, how fast, in what memory; a line per implementation."""
    found = overview(source)
    return Answer(
        [*_figures(source, found)],
        [*problems(source)],
        _chart(found),
        found.table(source, MAX_ANSWER_ROWS),
        found.context(source),
    )


def _figures(source: Source, found: Overview) -> Iterator[KeyFigure]:
    full = [row for row in source.maxima if row.is_full_pass]
    timed = split_by_sparsity(row for row in found.at if row.is_ok)
    searched = split_by_sparsity(row for row in full if row.max_tokens)
    several = len({*timed, *searched}) > 1
    figures = []
    for kind, rows in searched.items():
        label = f"Longest{f', {kind}' * several}"
        best = table_key(max(rows, key=lambda row: row.max_tokens))
        group = [row for row in rows if table_key(row) == best]
        is_stated = len(searched) == 1 and best == table_key(found.searched[0])
        figures.append(key_figures.longest(source, label, group, is_stated))
    if not searched:
        figures.append(key_figures.swept_end(found.swept))
    for kind, some in timed.items():
        figures.append(key_figures.fastest(f"Fastest{f', {kind}' * several}", some))
    figures.append(key_figures.least_memory(found.at))
    if not any(figures):
        figures += map(key_figures.minimum_sparsity, source.minima[:2])
    return filter(None, figures)


def _chart(found: Overview) -> Chart | None:
    """Draw the times of the lines of the table; else their longest lengths; else the peaks."""
    lines = found.lines[:MAX_ANSWER_ROWS]
    timed = [line.timed for line in lines if line.timed]
    if chart := section_charts.time_of_best(found.swept, timed):
        return chart
    longest = (line.longest for line in lines if line.longest)
    named = {f"{one.row.name}{in_brackets(one.where)}": one.row for one in longest}
    short = {name: row for name, row in named.items() if len(name) <= MAX_LABEL}
    return section_charts.longest_bars(short) or section_charts.memory(found.at, "")
