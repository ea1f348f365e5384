"""The report on implementations: side by side, and when to choose which."""

from __future__ import annotations

from longseq_bench.reports.assemble import SCALING, needed, recommended, whole
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.sections.growth import growth
from longseq_bench.reports.sections.recommendations import fastest, longest, ranks_pay
from longseq_bench.reports.sections.speeds import on_ranks, relative


@KINDS.register("implementations")
def build(source: Source) -> Document:
    """Time, memory, relative speed, complexity, many ranks, when to choose which."""
    _, grows = growth(source)
    several = len({row.label for row in source.rows if row.time_s}) > 1
    own = [
        relative(source),
        needed(grows, "implementation timed at three lengths", SCALING),
        on_ranks(source),
        recommended(fastest(source), longest(source), ranks_pay(source)),
    ]
    return whole("implementations", "Implementations side by side", source, own, several)
