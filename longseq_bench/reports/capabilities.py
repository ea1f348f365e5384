"""The report on capabilities: what works on this machine, how exactly, and from where it pays."""

from __future__ import annotations

from longseq_bench.reports.assemble import recommended, whole
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.sections.modes import gains, modes
from longseq_bench.reports.sections.recommendations import ranks_pay, sparse_pays
from longseq_bench.reports.sections.speeds import on_ranks


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
