"""The kinds of reports: each is a title and a list of sections."""

from dataclasses import replace

from longseq_bench.reports.answers import capabilities as capabilities_answer
from longseq_bench.reports.answers import devices as devices_answer
from longseq_bench.reports.answers import extreme as extreme_answer
from longseq_bench.reports.answers import implementations as implementations_answer
from longseq_bench.reports.answers import scaling as scaling_answer
from longseq_bench.reports.answers import summary as summary_answer
from longseq_bench.reports.assemble import build_document, recommendations_section
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Document
from longseq_bench.reports.sections import (
    at_a_glance,
    bottleneck,
    densities,
    doubling,
    findings,
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
    standard_attention,
    use_cases,
)
from longseq_bench.reports.sections import recommendations as rules


@KINDS.register("summary")
def summary(source: Source) -> Document:
    """Build the report of any records: every section that has content."""
    sections = [
        at_a_glance.all_implementations(source),
        findings.best_by_workload(source),
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
        "How long a sequence attention takes here",
        source,
        summary_answer.answer(source),
        known,
    )


@KINDS.register("capabilities")
def capabilities(source: Source) -> Document:
    """Build the report on modes: their numeric error, and the length from which each is faster."""
    gains = modes.gains(source)
    advice = rules.several_ranks(source), rules.sparsity(source)
    sections = [
        modes.modes(source),
        speeds.on_ranks(source),
        gains,
        recommendations_section(*advice, title="Where it begins to pay"),
    ]
    return build_document(
        "capabilities",
        "What works here",
        source,
        capabilities_answer.answer(source),
        sections,
        gains.has_content,
    )


@KINDS.register("devices")
def devices(source: Source) -> Document:
    """Build the report on several ranks: memory and time of each rank, compared with one rank."""
    batch = multi_rank.batches(source)
    sections = [
        recommendations_section(rules.several_ranks(source)),
        batch,
        ranks.each_rank(source),
        standard_attention.by_sparsity(source),
        multi_rank.against_one(source),
    ]
    return build_document(
        "devices",
        "Many devices",
        source,
        devices_answer.answer(source),
        sections,
        batch.has_content,
    )


@KINDS.register("extreme")
def extreme(source: Source) -> Document:
    """Build the report on extreme lengths: maxima, sweeps, memory, and a choice per use case."""
    answer = extreme_answer.answer(source)
    longest = maxima.maxima(source)
    sections = [
        use_cases.uses(source),
        densities.speed_over_dense(source),
        longest,
        rules.longest(source),
        rules.fastest(source),
        lengths.lengths(source),
        densities.against_length(source),
        doubling.doubling(source),
        standard_attention.against_standard(source),
        rules.overhead(source),
        hardware_projection.projected(source),
    ]
    known = [
        replace(section, charts=[c for c in section.charts if c != answer.chart])
        for section in sections
        if section.has_content
    ]
    return build_document(
        "extreme",
        "Extreme lengths",
        source,
        answer,
        known or [longest],
        bool(source.maxima),
    )


@KINDS.register("implementations")
def implementations(source: Source) -> Document:
    """Build the report on implementations: a ranking, growth, and what works on several ranks."""
    has_several = len({row.label for row in source.rows if row.time_s}) > 1
    sections = [
        speeds.relative(source),
        growth.exponents(source),
        speeds.on_ranks(source),
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
    """Build the report on scaling: segments, ranks, theory and measurement, bottlenecks."""
    found, dilation = growth.over_ranks(source), segments.segments(source)
    sections = [
        rules.longest(source),
        recommendations_section(rules.several_ranks(source)),
        dilation,
        segments.curve(source),
        lengths.over_ranks(source),
        found,
        growth.exponents(source),
        bottleneck.bottleneck(source),
    ]
    has_rows = found.has_content or dilation.has_content
    return build_document(
        "scaling", "Scaling", source, scaling_answer.answer(source), sections, has_rows
    )
