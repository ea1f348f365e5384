"""The first screen of the kind `capabilities`: a matrix, the largest error, where it pays."""

import re
from collections import Counter
from collections.abc import Iterator

from longseq_bench.analysis.row import require
from longseq_bench.reports import charts
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    MAX_FINDINGS,
    Answer,
    Chart,
    Finding,
    KeyFigure,
    format_cell,
)
from longseq_bench.reports.groups import group_by_workload
from longseq_bench.reports.sections import modes
from longseq_bench.reports.sections.modes import FAILS, PARTIAL, Matrix
from longseq_bench.reports.sections.multi_rank import compared

TITLE = "What works here"
MAX_REASON_WORDS = 10
"""Maximum number of words of a footnote; the section of capabilities has the complete reason."""


def answer(source: Source, matrix: Matrix) -> Answer:
    """Return the matrix of the most capable implementations, with the reasons as footnotes."""
    if not matrix.rows:
        return Answer()
    figures = [_working(matrix), *_error(source)]
    table = matrix.table(modes.LEGEND, MAX_ANSWER_ROWS)
    shown = [cell.split(" ")[-1] for row in table.rows for cell in map(str, row[1:])]
    footnotes = [_footnote(letter, matrix) for letter in matrix.reasons if letter in shown]
    return Answer(figures, footnotes[:MAX_FINDINGS], _chart(source), table)


def _footnote(letter: str, matrix: Matrix) -> Finding:
    """Return a letter and the first words of its reason, up to the first colon or semicolon."""
    reason = matrix.reasons[letter].removeprefix("unsupported: ")
    words = re.split("[;:]", reason)[0].split()
    cut = " …" if len(words) > MAX_REASON_WORDS else ""
    return Finding(f"{letter}: {' '.join(words[:MAX_REASON_WORDS])}{cut}", modes.TITLE)


def _working(matrix: Matrix) -> KeyFigure:
    """Count the implementations without a failure."""
    verdicts = [{cell.split(" ")[0] for cell in row[1:]} for row in matrix.rows]
    working = sum(not found & {FAILS, PARTIAL} for found in verdicts)
    words = "implementations, wherever they had memory and time"
    return KeyFigure("Work in all that was run", f"{working} of {len(verdicts)}", words)


def _error(source: Source) -> Iterator[KeyFigure]:
    known = [row for row in source.rows if row.is_ok and row.max_error is not None]
    if known:
        worst = max(known, key=lambda row: require(row.max_error))
        value = format_cell(worst.max_error, "error")
        yield KeyFigure(
            "Largest error of a sweep", value, f"{worst.name}, {worst.mode}, {worst.dtype}"
        )
    if wrong := Counter(row.name for row in source.rows if row.status == "wrong"):
        (name, _), *_ = wrong.most_common(1)
        yield KeyFigure("Wrong outputs", f"{wrong.total():,} trials", f"most with {name}")


def _chart(source: Source) -> Chart | None:
    """Return the chart of errors of the workload with the most implementations, or of speed-ups."""
    known = [row for row in source.rows if row.is_ok and row.max_error is not None]
    builders = (known, charts.errors), (compared(source), charts.speedup_by_length)
    for rows, build in builders:
        groups = group_by_workload(rows)
        largest = max(groups, key=lambda group: len({row.name for row in group}), default=[])
        if largest and (chart := build(largest, source.workload(largest[0]))):
            return chart
    return None
