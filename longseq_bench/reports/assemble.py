"""Build a complete report from the sections of a kind and the sections that all kinds share."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from longseq_bench.reports.base import SECTIONS, Source
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    MAX_FIGURES,
    Answer,
    Document,
    Section,
)
from longseq_bench.reports.samples_table import samples_table
from longseq_bench.reports.sections.failures import failures
from longseq_bench.reports.sections.provenance import (
    configs,
    context,
    hardware,
    how_it_ran,
    rerun,
    settings,
)
from longseq_bench.reports.sections.ranks import hangs
from longseq_bench.reports.wording import limit_findings

MAX_TABLES = 200
"""Maximum number of tables of a section: a file may name thousands of machines or workloads."""

_NO_RESULTS = (
    "These records have no rows for this kind of report. `longseq report FOLDER --kind auto` "
    "writes every kind that they have rows for.",
    "To produce results for this kind, run:",
)


def build_document(
    kind: str, title: str, source: Source, answer: Answer, sections: Sequence[Section],
    has_rows: bool, command: str,
) -> Document:  # fmt: skip
    """Build a report: answer, sections of the kind, registered sections, failures, provenance.

    has_rows: the records have rows for this kind.  command: shown where no section has content.
    A chart of the first screen is drawn once.
    """
    measured = settings(source), hardware(source), how_it_ran(source), *configs(source)
    shared = [
        *hangs(source),
        failures(source),
        *(replace(s, technical=True) for s in (rerun(source), *measured)),
    ]
    added = [name for name in SECTIONS.names() if name.partition(".")[0] == kind]
    broken = {name: reason for name in added if (reason := SECTIONS.unavailable_reason(name))}
    registered = [SECTIONS.get(name)(source) for name in added if name not in broken]
    notes = [f"Note: {note}" for note in source.notes]
    notes += [f"Note: section {name} is missing: {reason}" for name, reason in broken.items()]
    stated = context(source)
    answer = replace(
        answer, figures=answer.figures[:MAX_FIGURES], findings=limit_findings(answer.findings)
    )
    paragraphs = [stated, *filter(None, [" ".join(answer.context)]), *notes]
    own = [
        replace(
            one,
            points=limit_findings(one.points),
            charts=[chart for chart in one.charts if chart != answer.chart],
        )
        for one in (*sections, *registered)
    ]
    if not any(one.has_content for one in (answer.section, *own)):
        own = [Section("No results", _NO_RESULTS, code=[command])]
    shown = [_limit_tables(one) for one in (*own, *shared) if one.has_content]
    first = [answer.section] if answer.section.has_content else [*_extract_answer(shown[0])]
    shown = [*first, *(replace(one, is_detail=True) for one in shown)]
    records, unstable = source.records, source.unstable  # the data does not keep the tables
    return Document(
        kind,
        title,
        paragraphs,
        shown,
        lambda: samples_table(records, unstable),
        has_rows=has_rows,
        figures=answer.figures,
    )


def _limit_tables(section: Section) -> Section:
    """Return the section with its first MAX_TABLES tables, and a sentence on the others."""
    count = len(section.tables)
    if count <= MAX_TABLES:
        return section
    note = f"The first {MAX_TABLES:,} of {count:,} tables; the data as CSV has every measurement."
    return replace(
        section, paragraphs=[*section.paragraphs, note], tables=section.tables[:MAX_TABLES]
    )


def _extract_answer(section: Section) -> Iterator[Section]:
    """Yield the first chart and the first rows of a section that has more than a first screen."""
    tables = [replace(table, rows=table.rows[:MAX_ANSWER_ROWS]) for table in section.tables[:1]]
    charts = list(section.charts[:1])
    if (charts, tables) != (list(section.charts), list(section.tables)):
        yield Section(Answer().section.title, tables=tables, charts=charts)
