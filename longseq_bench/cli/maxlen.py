"""`longseq maxlen`: search for the longest sequence that an attention can take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longseq_bench.api.arguments import MAXLEN
from longseq_bench.cli import options
from longseq_bench.core.errors import UserError
from longseq_bench.core.settings import SEARCH, SHAPE
from longseq_bench.core.units import format_seconds

if TYPE_CHECKING:
    from longseq_bench.analysis.search_row import SearchRow
    from longseq_bench.core.model import Record
    from longseq_bench.reports.document import Document


@options.accept(MAXLEN | SEARCH | SHAPE)
def maxlen(
    impl: options.Implementations,
    option: options.ImplementationOptions = None,
    *,
    out: options.Out = None,
    as_json: options.AsJson = False,
    **given: Any,
) -> int:
    """Search for the longest sequence that each implementation can take here.

    The result is a bracket: the longest length that passed and was confirmed in a fresh process,
    and the shortest that failed, with what limited it: memory, time, a kernel's limit, numerics.
    If memory is the limit, the two lengths differ by at most 1 % or 64 tokens, whichever is larger
    (more if runs contradict each other). Tokens are those of all ranks together.
    """
    from longseq_bench.analysis.frames import maxlen_json, rows_json
    from longseq_bench.analysis.searches import density_rows
    from longseq_bench.api import length_search
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments
    from longseq_bench.reports.brief import density_brief

    results = length_search.maxlen(
        impl,
        options=parse_assignments(option or []),
        out=out or session.default_out(),
        progress=session.make_reporter(),
        **given,
    )
    records = results.records
    if "target" in given:
        return session.print_records(
            records, as_json, lambda run: rows_json(density_rows(run), "density"), density_brief
        )
    code = session.print_records(records, as_json, maxlen_json, _maxima)
    _check_time_budget(records)
    return code


def _maxima(records: list[Record]) -> Document:
    from longseq_bench.analysis.searches import search_rows
    from longseq_bench.reports.brief import search_brief

    sentences = [text for row in search_rows(records) if (text := bracket_sentence(row))]
    return search_brief(records, sentences)


def bracket_sentence(row: SearchRow) -> str | None:
    """Describe the bracket and its width in a sentence; None without a bracket."""
    passed, failed = row.max_tokens, row.first_failure
    if not passed or not failed:
        return None
    width = (failed - passed) / passed
    sentence = f"bracket: {passed:,} passed, {failed:,} failed, {width:.1%} apart"
    if row.limited_by == "time" and row.time_budget:
        limit = format_seconds(row.time_budget)
        sentence += f"; the time limit was {limit} a pass (--time-budget changes it)"
    return sentence


def _check_time_budget(records: list[Record]) -> None:
    """Raise UserError if the time budget was shorter than every run."""
    from longseq_bench.analysis.searches import search_rows

    for row in search_rows(records):
        if row.max_tokens == 0 and row.limited_by == "time":
            shortest = row.first_failure
            raise UserError(
                f"time budget {row.time_budget or 0:.3g} s is shorter than one run of "
                f"{row.name}: {shortest} token(s) took longer; raise --time-budget"
            )
