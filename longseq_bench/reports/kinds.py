"""The kinds of reports: each has a title, a first screen, and a list of sections."""

from collections.abc import Callable, Iterable
from functools import partial

from longseq_bench.reports.answers import (
    capabilities,
    devices,
    extreme,
    implementations,
    scaling,
    summary,
)
from longseq_bench.reports.assemble import build_document
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Answer, Document, Section
from longseq_bench.reports.sections import modes
from longseq_bench.reports.sections.at_a_glance import all_implementations
from longseq_bench.reports.sections.bottleneck import bottleneck
from longseq_bench.reports.sections.gains import DENSE, ONE_RANK, where_it_pays
from longseq_bench.reports.sections.growth import exponents, minimum_sparsity, over_ranks
from longseq_bench.reports.sections.hardware_projection import projected
from longseq_bench.reports.sections.lengths import lengths
from longseq_bench.reports.sections.maxima import maxima
from longseq_bench.reports.sections.multi_rank import against_one
from longseq_bench.reports.sections.ranks import each_rank
from longseq_bench.reports.sections.recommendations import fastest
from longseq_bench.reports.sections.segments import segments
from longseq_bench.reports.sections.sparse import sparse
from longseq_bench.reports.sections.speeds import relative
from longseq_bench.reports.sections.use_cases import uses

_SWEEP = "longseq sweep configs/quickstart.yaml"
_ranks_pay = partial(where_it_pays, references=[ONE_RANK])


def _register(
    kind: str,
    title: str,
    answer: Callable[[Source], Answer],
    sections: Iterable[Callable[[Source], Section]],
    command: str,
    has_rows: Callable[[Source], bool] | None = None,
) -> None:
    """Register a kind.

    command: produces rows for it, with files of the checkout only.
    has_rows: the records have rows for it; if None, where a section has.
    """

    def build(source: Source) -> Document:
        built = [section(source) for section in sections]
        known = has_rows(source) if has_rows else any(section.has_content for section in built)
        return build_document(kind, title, source, answer(source), built, known, command)

    KINDS.register(kind)(build)


_register(
    "summary", "How many tokens attention takes here", summary.answer,
    [all_implementations, fastest, sparse, maxima, lengths, minimum_sparsity, over_ranks,
     exponents, each_rank],
    _SWEEP,
)  # fmt: skip
_register(
    "devices", devices.TITLE, devices.answer, [each_rank, against_one, over_ranks, _ranks_pay],
    "longseq sweep configs/parallel.yaml",
)  # fmt: skip
_register(
    "extreme", extreme.TITLE, extreme.answer,
    [uses, sparse, maxima, fastest, partial(where_it_pays, references=[DENSE]), lengths,
     minimum_sparsity, exponents, projected],
    "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99",
    lambda source: bool(source.maxima),
)  # fmt: skip
_register(
    "implementations", "Implementations side by side", implementations.answer,
    [relative, exponents, _ranks_pay], _SWEEP,
    lambda source: len({row.label for row in source.rows if row.time_s}) > 1,
)  # fmt: skip
_register(
    "scaling", scaling.TITLE, scaling.answer,
    [over_ranks, segments, exponents, bottleneck, _ranks_pay],
    "longseq scaling --impl ring --impl ulysses --world-sizes 1,2",
)  # fmt: skip


@KINDS.register("capabilities")
def _build_capabilities(source: Source) -> Document:
    matrix = modes.build_matrix(source)
    sections = [
        modes.capabilities(matrix), modes.errors(source),
        where_it_pays(source, [ONE_RANK, DENSE]), against_one(source),
    ]  # fmt: skip
    answer = capabilities.answer(source, matrix)
    title, known = capabilities.TITLE, bool(matrix.rows)
    return build_document("capabilities", title, source, answer, sections, known, _SWEEP)
