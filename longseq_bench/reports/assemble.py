"""Build a complete report from the sections of a kind and the sections that all kinds share."""

from collections.abc import Sequence
from dataclasses import replace

from longseq_bench.reports.base import SECTIONS, Source
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    MAX_FIGURES,
    Document,
    KeyFigure,
    Section,
)
from longseq_bench.reports.samples_table import samples_table
from longseq_bench.reports.sections.failures import failures
from longseq_bench.reports.sections.findings import problems
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
    kind: str, title: str, source: Source, figures: Sequence[KeyFigure],
    sections: Sequence[Section], has_rows: bool, command: str,
) -> Document:  # fmt: skip
    """Build a report: first screen, sections of the kind, registered ones, failures, provenance.

    has_rows: the records have rows for this kind.  command: shown where no section has content.
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
    own = [replace(s, points=limit_findings(s.points)) for s in (*sections, *registered)]
    if not any(one.has_content for one in own):
        own = [Section("No results", _NO_RESULTS, code=[command])]
    first = _first_screen(own, limit_findings(problems(source)))
    shown = [_limit_tables(_without(one, first)) for one in (*own, *shared)]
    details = [replace(one, is_detail=True) for one in shown if one.has_content]
    records, unstable = source.records, source.unstable  # the data does not keep the tables
    return Document(
        kind,
        title,
        [context(source), *notes],
        [*([first] if first.has_content else []), *details],
        lambda: samples_table(records, unstable),
        has_rows=has_rows,
        figures=figures[:MAX_FIGURES],
    )


def _first_screen(sections: Sequence[Section], findings: Sequence[str]) -> Section:
    """Return the section below the key figures: what to distrust, the first chart, first rows."""
    table = next((table for section in sections for table in section.tables), None)
    if table and len(table.rows) > MAX_ANSWER_ROWS:
        cut = f"{MAX_ANSWER_ROWS} of {len(table.rows):,} rows"
        title = f"{cut}: {table.title}" if table.title else cut
        table = replace(table, title=title, rows=table.rows[:MAX_ANSWER_ROWS])
    chart = next((chart for section in sections for chart in section.charts), None)
    tables, charts = [table] if table else [], [chart] if chart else []
    return Section("Answer", points=findings, tables=tables, charts=charts)


def _without(section: Section, first: Section) -> Section:
    """Return a section without the chart of the first screen, and without all that it shows."""
    charts = [chart for chart in section.charts if chart not in first.charts]
    is_shown = not section.paragraphs and list(section.tables) == list(first.tables)
    return replace(section, charts=charts, tables=[] if is_shown else section.tables)


def _limit_tables(section: Section) -> Section:
    """Return the section with its first MAX_TABLES tables, and a sentence on the others."""
    count = len(section.tables)
    if count <= MAX_TABLES:
        return section
    note = f"The first {MAX_TABLES:,} of {count:,} tables; the data as CSV has every measurement."
    return replace(
        section, paragraphs=[*section.paragraphs, note], tables=section.tables[:MAX_TABLES]
    )
