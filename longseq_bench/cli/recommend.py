"""`longseq recommend`: which attention for some lengths, and how far each one goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longseq_bench.cli import options
from longseq_bench.core.settings import SEARCH, SHAPE

if TYPE_CHECKING:
    from longseq_bench.api.results import Results


@options.declare(SEARCH | SHAPE)
def recommend(
    impl: options.SomeImplementations = None,
    option: options.ImplementationOptions = None,
    tokens: str = "8k,32k",
    within: str = "2min",
    *,
    out: options.Out = None,
    as_json: options.AsJson = False,
    **given: Any,
) -> int:
    """Say which attention to use at some lengths, and how far each one goes in memory.

    The cheapest runs come first, and each output is checked against float64. What would take longer
    is predicted from them, and marked ~: `longseq sweep` with the config.yaml of the folder runs
    it, `longseq maxlen --fit-only` the longest lengths; give both the same --out.

    Without --impl: sdpa and ring, which are exact; block-sparse 99 % with a window, and with a
    window and sinks; block-sparse-adaptive 99 %; dilated and hilbert with segments of 2k and 8k.

    Options:
        tokens: Sequence lengths, 32k,128k.
        within: Time of all runs together, in s or min, after some seconds of dry runs.
    """
    from longseq_bench.api.recommendation import recommend
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments
    from longseq_bench.core.units import parse_tokens
    from longseq_bench.reports.sections.by_length import find_answers

    given |= {"out": out or session.default_out(), "progress": session.make_reporter()}
    assigned, lengths = parse_assignments(option or []), options.split_names(tokens)
    results = recommend(impl, tokens=lengths, within=within, options=assigned, **given)
    passed = {row.tokens for row in results.rows if row.is_ok}
    failed = [n for n in lengths if parse_tokens(n) not in passed]
    if failed and not find_answers(results.source):
        session.print_lines([f"no implementation passed at {' or '.join(failed)} tokens"], "yellow")
    return session.print_results(results, as_json, lambda: _answers_json(results))


def _answers_json(results: Results) -> dict[str, Any]:
    """Return the document {"schema", "rows", "answers"}: measured rows, and the printed table."""
    from longseq_bench.analysis.frames import finite, rows_json
    from longseq_bench.reports.sections.by_length import by_length

    answers = [
        {column.name: finite(cell) for column, cell in zip(table.columns, row, strict=True)}
        for table in by_length(results.source).tables
        for row in table.rows
    ]
    return {**rows_json(results.rows, "rows"), "answers": answers}
