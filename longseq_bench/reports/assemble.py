"""Build a complete report from the sections of a kind and the sections that all kinds share."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from longseq_bench.reports.base import SEARCH, SECTIONS, SWEEP, Source
from longseq_bench.reports.document import Document, Section
from longseq_bench.reports.samples_table import samples_table
from longseq_bench.reports.sections.failures import failures
from longseq_bench.reports.sections.provenance import (
    configs,
    dates,
    describe_machines,
    hardware,
    how_it_ran,
    reproduce,
)
from longseq_bench.reports.sections.ranks import hangs
from longseq_bench.reports.wording import limit_sentences


def build_document(
    kind: str, title: str, source: Source, own: Sequence[Section], suited: bool = True
) -> Document:
    """Build a report: its own and registered sections, failures, machines, commands to repeat it.

    suited: the records have rows for this kind.
    """
    ending = [
        failures(source), *hangs(source), hardware(source), how_it_ran(source), reproduce(source),
        *configs(source),
    ]  # fmt: skip
    added = [name for name in SECTIONS.names() if name.partition(".")[0] == kind]
    broken = {name: reason for name in added if (reason := SECTIONS.unavailable_reason(name))}
    registered = [SECTIONS.get(name)(source) for name in added if name not in broken]
    sections = map(_complete, (*own, *registered, *ending))
    notes = [f"Note: {note}" for note in source.notes]
    notes += [f"Note: section {name} is missing: {reason}" for name, reason in broken.items()]
    records = source.records  # the data keeps only these, not the source's tables
    return Document(
        kind,
        title,
        [dates(source.records), *describe_machines(source), *notes],
        [section for section in sections if section.has_content],
        lambda: samples_table(records),
        suited=suited,
    )


def _complete(section: Section) -> Section:
    """Return the section, its sentences limited; without rows, name the commands that make them."""
    if not section.missing:
        return section
    if section.has_content:
        return replace(section, points=limit_sentences(section.points))
    rows, *commands = section.missing
    about = [f"There is no {rows} among these records. To have it:"]
    return Section(section.title, about, code=commands)


def recommendations_section(*rules: Iterable[str], title: str = "Recommendations") -> Section:
    """Return a section with the first sentences of each rule, in the order of the rules."""
    if points := [sentence for rule in rules for sentence in limit_sentences(rule)]:
        return Section(title, ["Each follows from the rows in its brackets."], points)
    return Section(title, missing=("pair of rows that a choice could rest on", SEARCH, SWEEP))
