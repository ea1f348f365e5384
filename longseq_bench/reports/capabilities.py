"""The report on capabilities: what works on this machine, how exactly, and from where it pays."""

from __future__ import annotations

from longseq_bench.reports.advice import ranks_pay, sparse_pays
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.modes import gains, modes
from longseq_bench.reports.speeds import on_ranks
from longseq_bench.reports.whole import recommended, whole


@KINDS.register("capabilities")
def build(source: Source) -> Document:
    """Each mode with its numeric error, speed-up by length, where it begins to pay."""
    faster = gains(source)
    own = [
        modes(source),
        on_ranks(source),
        faster,
        recommended(ranks_pay(source), sparse_pays(source), title="Where it begins to pay"),
    ]
    return whole("capabilities", "What works here", source, own, suited=not faster.wanting)
