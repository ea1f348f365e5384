"""The first screen of the kind `implementations`."""

from operator import attrgetter

from longseq_bench.reports import charts, key_figures
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import ValueColumn, build_table
from longseq_bench.reports.document import Answer, Cell
from longseq_bench.reports.groups import group_by_workload, split_by_sparsity, table_key
from longseq_bench.reports.sections import speeds
from longseq_bench.reports.sections.at_a_glance import find_longest
from longseq_bench.reports.sections.findings import problems

MAX_ROWS = 12
"""Maximum number of rows of the first table; the section of relative speeds has all."""


def answer(source: Source) -> Answer:
    """Return the first screen: a ranking at one length, and the time over length."""
    if not any(row.time_s for row in source.rows):
        return Answer()
    group = max(group_by_workload(source.rows), key=lambda rows: len({r.name for r in rows}))
    ranking = speeds.rank_group(source, group)
    searched, by_name = find_longest(source, attrgetter("name"))

    def longest(item: speeds.Ranked) -> Cell:
        found = by_name.get(item.row.name)
        return found and found.describe()

    is_same = bool(searched) and table_key(searched[0]) == table_key(group[0])
    columns = (
        speeds.NAME, speeds.PAIRS, speeds.TIME, speeds.ABOVE, speeds.SPEED, speeds.PEAK,
        ValueColumn("Longest", "text", longest), speeds.ERROR,
    )  # fmt: skip
    count = len(ranking.rows)
    shown = f"{MAX_ROWS} of {count:,} rows: " if count > MAX_ROWS else ""
    title = f"{shown}{ranking.title}; ≈: no significant difference"
    if searched and not is_same:
        title += f"; longest: {source.workload(searched[0])}"
    timed = split_by_sparsity(item.row for item in ranking.rows if item.row.is_ok)
    every = [row for rows in timed.values() for row in rows]
    figures = [
        *(
            key_figures.fastest(f"Fastest{f', {kind}' * (len(timed) > 1)}", rows)
            for kind, rows in timed.items()
        ),
        key_figures.least_memory(every),
        key_figures.longest(source, "Longest", searched, is_same),
        key_figures.most_exact(every),
    ]
    workload = source.workload(group[0])
    return Answer(
        [figure for figure in figures if figure],
        [*problems(source)],
        charts.time_of_best(group, [item.row for item in ranking.rows[:MAX_ROWS]]),
        build_table(title, columns, ranking.rows[:MAX_ROWS]),
        [f"Times, memory, errors: {workload}."] if workload else [],
    )
