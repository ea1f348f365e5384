"""The report on extreme lengths: how far each implementation goes, and what that takes."""

from __future__ import annotations

from longseq_bench.reports.assemble import SEARCH, SWEEP, needed, recommended, whole
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.sections.densities import against_length
from longseq_bench.reports.sections.doubling import doubling
from longseq_bench.reports.sections.hardware_projection import projected
from longseq_bench.reports.sections.lengths import lengths
from longseq_bench.reports.sections.maxima import maxima
from longseq_bench.reports.sections.recommendations import fastest, leanest, longest, sparse_pays
from longseq_bench.reports.sections.standard_attention import beside_standard
from longseq_bench.reports.sections.use_cases import uses


@KINDS.register("extreme")
def build(source: Source) -> Document:
    """Maxima, sweeps, sparsity, time a doubling, memory, and what suits which use."""
    own = [
        recommended(longest(source), fastest(source), sparse_pays(source), leanest(source)),
        needed(maxima(source), "search for the longest length", SEARCH),
        needed(lengths(source), "sweep", SWEEP),
        against_length(source),
        doubling(source),
        beside_standard(source),
        uses(source),
        projected(source),
    ]
    return whole("extreme", "Extreme lengths", source, own, suited=bool(source.maxima))
