"""The report of any records: a summary, a table a question, how to run it again."""

from __future__ import annotations

from longseq_bench.reports.assemble import whole
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document, Section
from longseq_bench.reports.sections.findings import findings
from longseq_bench.reports.sections.growth import growth, least_sparse
from longseq_bench.reports.sections.lengths import lengths
from longseq_bench.reports.sections.maxima import maxima
from longseq_bench.reports.sections.ranks import each_rank
from longseq_bench.reports.sections.sparse import sparse


@KINDS.register("summary")
def build(source: Source) -> Document:
    """Everything a folder of records says. Every figure is computed from the records."""
    own = [
        Section("Summary", points=findings(source)),
        maxima(source),
        lengths(source),
        sparse(source),
        least_sparse(source),
        *growth(source),
        each_rank(source),
    ]
    return whole("summary", "How long a sequence attention takes here", source, own)
