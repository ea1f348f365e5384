"""The report on devices: what each of several ranks holds and takes, against one."""

from __future__ import annotations

from longseq_bench.reports.assemble import needed, recommended, whole
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.sections.densities import against_memory
from longseq_bench.reports.sections.multi_rank import SWEEP_RANKS, against_one, batches
from longseq_bench.reports.sections.ranks import each_rank
from longseq_bench.reports.sections.recommendations import ranks_pay


@KINDS.register("devices")
def build(source: Source) -> Document:
    """Batch, length, time and memory of each rank; memory by sparsity; single against many."""
    spread = batches(source)
    own = [
        recommended(ranks_pay(source)),
        spread,
        needed(each_rank(source), "trial on several ranks", SWEEP_RANKS),
        against_memory(source),
        against_one(source),
    ]
    return whole("devices", "Many devices", source, own, suited=not spread.wanting)
