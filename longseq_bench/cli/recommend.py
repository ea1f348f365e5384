"""`longseq recommend`: which attention for these lengths, and how far each one goes."""

from __future__ import annotations

from typing import Any

from longseq_bench.api.arguments import RECOMMEND
from longseq_bench.cli import options
from longseq_bench.core.settings import SEARCH, SHAPE


@options.declare(RECOMMEND | SEARCH | SHAPE)
def recommend(
    impl: options.SomeImplementations = None,
    option: options.ImplementationOptions = None,
    tokens: str = "8k,32k",
    *,
    out: options.Out = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
    **given: Any,
) -> int:
    """Say which attention to use at some lengths, and how far each one goes in memory.

    The cheapest runs come first, in at most --within. Every output is checked against float64. What
    would take longer is predicted from shorter runs, and marked ~. Run it again with the same --out
    to continue; `longseq sweep` with the config.yaml in that folder runs what was predicted.

    Without --impl: sdpa and ring, which are exact; block-sparse 99 % with a window, and with a
    window and sinks; block-sparse-adaptive 99 %; dilated and hilbert with segments of 2k and 8k.

    Options:
        tokens: Sequence lengths, 32k,128k. Default: 8k,32k.
    """
    from longseq_bench.api import recommendation
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments
    from longseq_bench.reports.sections.by_length import answers_json

    results = recommendation.recommend(
        impl,
        tokens=tokens.split(","),
        options=parse_assignments(option or []),
        out=out or session.default_out(),
        progress=session.make_reporter(verbose),
        **given,
    )
    return session.print_results(results, as_json, answers_json)
