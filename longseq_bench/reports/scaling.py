"""The report on scaling: maxima by segments and over ranks, beside theory, and what limits them."""

from __future__ import annotations

from longseq_bench.reports.assemble import SCALING, needed, recommended, whole
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.sections.bottleneck import bottleneck
from longseq_bench.reports.sections.growth import growth
from longseq_bench.reports.sections.lengths import over_ranks
from longseq_bench.reports.sections.multi_rank import SWEEP_RANKS
from longseq_bench.reports.sections.recommendations import longest, ranks_pay
from longseq_bench.reports.sections.segments import curve, segments


@KINDS.register("scaling")
def build(source: Source) -> Document:
    """Segments and dilation, the curve, many ranks, theory and fact, bottlenecks."""
    reached, grows = growth(source)
    walks = segments(source)
    own = [
        recommended(longest(source), ranks_pay(source)),
        walks,
        curve(source),
        needed(over_ranks(source), "trial on several ranks", SWEEP_RANKS),
        needed(reached, "search on several numbers of ranks", SCALING),
        needed(grows, "implementation timed at three lengths", SCALING),
        bottleneck(source),
    ]
    return whole("scaling", "Scaling", source, own, suited=reached.holds or not walks.wanting)
