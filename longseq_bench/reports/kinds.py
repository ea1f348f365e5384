"""The kinds of reports: each has a title, key figures for its first screen, and sections.

The first chart and the first table of the sections are on the first screen too.
"""

from collections.abc import Callable, Iterable
from functools import partial

from longseq_bench.reports import key_figures as key
from longseq_bench.reports.assemble import build_document
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document, Section
from longseq_bench.reports.sections.at_a_glance import all_implementations
from longseq_bench.reports.sections.bottleneck import bottleneck
from longseq_bench.reports.sections.gains import DENSE, ONE_RANK, where_it_pays
from longseq_bench.reports.sections.growth import exponents, minimum_sparsity, over_ranks
from longseq_bench.reports.sections.hardware_projection import projected
from longseq_bench.reports.sections.lengths import lengths
from longseq_bench.reports.sections.maxima import maxima
from longseq_bench.reports.sections.modes import capabilities, errors
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
    figures: Iterable[Callable[[Source], key.Figures]],
    sections: Iterable[Callable[[Source], Section]],
    command: str,
    has_rows: Callable[[Source], bool] | None = None,
) -> None:
    """Register a kind.

    figures: the first MAX_FIGURES that they yield are shown.
    command: produces rows for it, with files of the checkout only.
    has_rows: the records have rows for it; if None, where a section has.
    """

    def build(source: Source) -> Document:
        built = [section(source) for section in sections]
        known = has_rows(source) if has_rows else any(section.has_content for section in built)
        found = [figure for yield_figures in figures for figure in yield_figures(source)]
        return build_document(kind, title, source, found, built, known, command)

    KINDS.register(kind)(build)


_register(
    "summary",
    "How many tokens attention takes here",
    [key.longest, key.fastest, key.least_memory, key.minimum_sparsity],
    [
        all_implementations,
        fastest,
        sparse,
        maxima,
        lengths,
        minimum_sparsity,
        over_ranks,
        exponents,
        each_rank,
    ],
    _SWEEP,
)
_register(
    "devices",
    "Many devices",
    [key.best_speedup, key.rank_memory, key.exposed, key.longest_on_ranks],
    [against_one, over_ranks, each_rank, _ranks_pay],
    "longseq sweep configs/parallel.yaml",
)
_register(
    "extreme",
    "Extreme lengths",
    [key.longest, key.memory_alone, key.fastest],
    [
        uses,
        maxima,
        sparse,
        fastest,
        partial(where_it_pays, references=[DENSE]),
        lengths,
        minimum_sparsity,
        exponents,
        projected,
    ],
    "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99",
    lambda source: bool(source.maxima),
)
_register(
    "implementations",
    "Implementations side by side",
    [key.fastest, key.least_memory, key.longest, key.most_exact],
    [relative, exponents, _ranks_pay],
    _SWEEP,
    lambda source: len({row.label for row in source.rows if row.time_s}) > 1,
)
_register(
    "scaling",
    "Scaling",
    [key.growth_with_ranks, key.exponent_of_time, key.most_frequent_limit],
    [over_ranks, exponents, segments, bottleneck, _ranks_pay],
    "longseq scaling --impl ring --impl ulysses --world-sizes 1,2",
)
_register(
    "capabilities",
    "What works here",
    [key.working, key.largest_error],
    [capabilities, errors, partial(where_it_pays, references=[ONE_RANK, DENSE]), against_one],
    _SWEEP,
)
