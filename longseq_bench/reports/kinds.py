"""The kinds of reports: each is a title and a list of sections."""

from dataclasses import replace

from longseq_bench.reports.answers import capabilities as capabilities_answer
from longseq_bench.reports.answers import devices as devices_answer
from longseq_bench.reports.answers import extreme as extreme_answer
from longseq_bench.reports.answers import implementations as implementations_answer
from longseq_bench.reports.answers import scaling as scaling_answer
from longseq_bench.reports.answers import summary as summary_answer
from longseq_bench.reports.assemble import build_document
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.sections import (
    at_a_glance,
    bottleneck,
    gains,
    growth,
    hardware_projection,
    lengths,
    maxima,
    modes,
    multi_rank,
    ranks,
    segments,
    sparse,
    speeds,
    use_cases,
)
from longseq_bench.reports.sections import recommendations as rules


@KINDS.register("summary")
def summary(source: Source) -> Document:
    """Build the report of any records: every section that has content."""
    sections = [
        at_a_glance.all_implementations(source),
        rules.fastest(source),
        maxima.maxima(source),
        lengths.lengths(source),
        sparse.sparse(source),
        growth.minimum_sparsity(source),
        growth.over_ranks(source),
        growth.exponents(source),
        ranks.each_rank(source),
    ]
    known = [section for section in sections if section.has_content]
    return build_document(
        "summary",
        "How many tokens attention takes here",
        source,
        summary_answer.answer(source),
        known,
    )


@KINDS.register("capabilities")
def capabilities(source: Source) -> Document:
    """Build the report on capabilities: what works, numeric errors, from where it pays."""
    matrix = modes.build_matrix(source)
    sections = [
        modes.capabilities(matrix),
        modes.errors(source),
        gains.where_it_pays(source, gains.ONE_RANK, gains.DENSE),
        multi_rank.against_one(source),
    ]
    answer = capabilities_answer.answer(source, matrix)
    has_rows = bool(matrix.rows)
    return build_document(
        "capabilities", capabilities_answer.TITLE, source, answer, sections, has_rows
    )


@KINDS.register("devices")
def devices(source: Source) -> Document:
    """Build the report on several ranks: speed, memory of each, and from where they pay."""
    sections = [
        ranks.each_rank(source),
        multi_rank.against_one(source),
        growth.over_ranks(source),
        gains.where_it_pays(source, gains.ONE_RANK),
    ]
    has_rows = any(section.has_content for section in sections)
    answer = devices_answer.answer(source)
    return build_document("devices", devices_answer.TITLE, source, answer, sections, has_rows)


@KINDS.register("extreme")
def extreme(source: Source) -> Document:
    """Build the report on extreme lengths: maxima, sweeps, memory, and a choice per use case."""
    answer = extreme_answer.answer(source)
    longest = maxima.maxima(source)
    sections = [
        use_cases.uses(source),
        sparse.sparse(source),
        longest,
        rules.fastest(source),
        gains.where_it_pays(source, gains.DENSE),
        lengths.lengths(source),
        growth.minimum_sparsity(source),
        growth.exponents(source),
        hardware_projection.projected(source),
    ]
    known = [
        replace(section, charts=[c for c in section.charts if c != answer.chart])
        for section in sections
        if section.has_content
    ]
    return build_document(
        "extreme",
        extreme_answer.TITLE,
        source,
        answer,
        known or [longest],
        bool(source.maxima),
    )


@KINDS.register("implementations")
def implementations(source: Source) -> Document:
    """Build the report on implementations: a ranking, growth, and from where ranks pay."""
    has_several = len({row.label for row in source.rows if row.time_s}) > 1
    sections = [
        speeds.relative(source),
        growth.exponents(source),
        gains.where_it_pays(source, gains.ONE_RANK),
    ]
    return build_document(
        "implementations",
        "Implementations side by side",
        source,
        implementations_answer.answer(source),
        sections,
        has_several,
    )


@KINDS.register("scaling")
def scaling(source: Source) -> Document:
    """Build the report on scaling: theory and measurement, segments, exponents, bottlenecks."""
    answer = scaling_answer.answer(source)
    found = growth.over_ranks(source)
    sections = [
        replace(found, charts=[chart for chart in found.charts if chart != answer.chart]),
        segments.segments(source),
        growth.exponents(source),
        bottleneck.bottleneck(source),
        gains.where_it_pays(source, gains.ONE_RANK),
    ]
    has_rows = any(section.has_content for section in sections)
    return build_document("scaling", scaling_answer.TITLE, source, answer, sections, has_rows)
