"""The kinds of reports: each is a title and a list of sections."""

from longseq_bench.reports.assemble import (
    SCALING,
    SEARCH,
    SWEEP,
    SWEEP_RANKS,
    build_document,
    or_missing,
    recommendations_section,
)
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document, Section
from longseq_bench.reports.sections.bottleneck import bottleneck
from longseq_bench.reports.sections.densities import against_length, against_memory
from longseq_bench.reports.sections.doubling import doubling
from longseq_bench.reports.sections.findings import findings
from longseq_bench.reports.sections.growth import growth, least_sparse
from longseq_bench.reports.sections.hardware_projection import projected
from longseq_bench.reports.sections.lengths import lengths, over_ranks
from longseq_bench.reports.sections.maxima import maxima
from longseq_bench.reports.sections.modes import gains, modes
from longseq_bench.reports.sections.multi_rank import against_one, batches
from longseq_bench.reports.sections.ranks import each_rank
from longseq_bench.reports.sections.recommendations import (
    fastest,
    leanest,
    longest,
    ranks_pay,
    sparse_pays,
)
from longseq_bench.reports.sections.segments import curve, segments
from longseq_bench.reports.sections.sparse import sparse
from longseq_bench.reports.sections.speeds import on_ranks, relative
from longseq_bench.reports.sections.standard_attention import beside_standard
from longseq_bench.reports.sections.use_cases import uses


@KINDS.register("summary")
def summary(source: Source) -> Document:
    """Build the report of any records: every section that has content."""
    sections = [
        Section("Summary", points=findings(source)),
        maxima(source),
        lengths(source),
        sparse(source),
        least_sparse(source),
        *growth(source),
        each_rank(source),
    ]
    return build_document("summary", "How long a sequence attention takes here", source, sections)


@KINDS.register("capabilities")
def capabilities(source: Source) -> Document:
    """Build the report on modes: their numeric error, and the length from which each is faster."""
    gain = gains(source)
    sections = [
        modes(source),
        on_ranks(source),
        gain,
        recommendations_section(
            ranks_pay(source), sparse_pays(source), title="Where it begins to pay"
        ),
    ]
    return build_document("capabilities", "What works here", source, sections, not gain.is_missing)


@KINDS.register("devices")
def devices(source: Source) -> Document:
    """Build the report on several ranks: memory and time of each rank, compared with one rank."""
    batch = batches(source)
    sections = [
        recommendations_section(ranks_pay(source)),
        batch,
        or_missing(each_rank(source), "trial on several ranks", SWEEP_RANKS),
        against_memory(source),
        against_one(source),
    ]
    return build_document("devices", "Many devices", source, sections, not batch.is_missing)


@KINDS.register("extreme")
def extreme(source: Source) -> Document:
    """Build the report on extreme lengths: maxima, sweeps, memory, and a choice per use case."""
    rules = longest(source), fastest(source), sparse_pays(source), leanest(source)
    sections = [
        recommendations_section(*rules),
        or_missing(maxima(source), "search for the longest length", SEARCH),
        or_missing(lengths(source), "sweep", SWEEP),
        against_length(source),
        doubling(source),
        beside_standard(source),
        uses(source),
        projected(source),
    ]
    return build_document("extreme", "Extreme lengths", source, sections, bool(source.maxima))


@KINDS.register("implementations")
def implementations(source: Source) -> Document:
    """Build the report on implementations: a comparison, and when to choose each one."""
    _, exponents = growth(source)
    has_several = len({row.label for row in source.rows if row.time_s}) > 1
    sections = [
        relative(source),
        or_missing(exponents, "implementation timed at three lengths", SCALING),
        on_ranks(source),
        recommendations_section(fastest(source), longest(source), ranks_pay(source)),
    ]
    return build_document(
        "implementations", "Implementations side by side", source, sections, has_several
    )


@KINDS.register("scaling")
def scaling(source: Source) -> Document:
    """Build the report on scaling: segments, ranks, theory and measurement, bottlenecks."""
    maxima_over_ranks, exponents = growth(source)
    dilation = segments(source)
    sections = [
        recommendations_section(longest(source), ranks_pay(source)),
        dilation,
        curve(source),
        or_missing(over_ranks(source), "trial on several ranks", SWEEP_RANKS),
        or_missing(maxima_over_ranks, "search on several numbers of ranks", SCALING),
        or_missing(exponents, "implementation timed at three lengths", SCALING),
        bottleneck(source),
    ]
    suits = maxima_over_ranks.has_content or not dilation.is_missing
    return build_document("scaling", "Scaling", source, sections, suits)
