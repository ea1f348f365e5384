"""`longseq maxlen`: search for the longest sequence that an attention can take."""

from __future__ import annotations

from typing import Any

from longseq_bench.api.arguments import MAXLEN
from longseq_bench.cli import options, submission
from longseq_bench.core.settings import SEARCH, SHAPE


@options.declare(MAXLEN | SEARCH | SHAPE | submission.SUBMIT)
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
    (more if runs contradict each other). Wrong outputs at two lengths far apart end the search.
    Tokens are those of all ranks together.
    """
    from longseq_bench.analysis.frames import rows_json
    from longseq_bench.api import grid, length_search
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments

    shared, reporter = parse_assignments(option or []), session.make_reporter()
    here = {"--shard": given.get("shard")}
    one = {"tokens": 1, "implementations": impl, "options": shared}
    results = submission.run(given, out, here, lambda: grid.check_sweep(None, reporter, **one))
    if not results:
        out = out or session.default_out(given.get("shard"))
        results = length_search.maxlen(impl, options=shared, out=out, progress=reporter, **given)
    return session.print_results(results, as_json, lambda: rows_json(results.maxima, "results"))
