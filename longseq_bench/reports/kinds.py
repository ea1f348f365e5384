"""Reports of records: their kinds, each of which has a title and sections, and their files.

`build_document` puts a kind's sections, those that all kinds share and the tidy table (one row per
measurement) together. The first chart and the first table of the sections are on the first screen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from longseq_bench.core.errors import StoreError, keep_lines
from longseq_bench.core.model import Record
from longseq_bench.reports.base import FORMATS, KINDS, Files, Source
from longseq_bench.reports.columns import make_columns
from longseq_bench.reports.document import MAX_ANSWER_ROWS, MAX_FINDINGS, Document, Section, Table
from longseq_bench.reports.groups import limit_findings
from longseq_bench.reports.render.csv import samples_table
from longseq_bench.reports.sections.advice import (
    beyond_exact,
    fastest_exact,
    several_ranks,
    sparse_over_exact,
)
from longseq_bench.reports.sections.at_a_glance import all_implementations, key_figures
from longseq_bench.reports.sections.by_length import by_length, find_answers
from longseq_bench.reports.sections.capabilities import capabilities, requirements
from longseq_bench.reports.sections.failures import failures, never_ran, suspicions, wrong_outputs
from longseq_bench.reports.sections.growth import exponents, over_ranks
from longseq_bench.reports.sections.lengths import lengths, maxima
from longseq_bench.reports.sections.provenance import (
    configs,
    context,
    hardware,
    how_it_ran,
    rerun,
    settings,
)
from longseq_bench.reports.sections.ranks import against_one
from longseq_bench.reports.sections.sparse import sparse

# ---- a report from its sections and those that all kinds share -----------------------------------

_NO_RESULTS = (
    "These records have no rows for this kind of report. `longseq report FOLDER --kind auto` "
    "writes every kind that they have rows for.",
    "To produce results for this kind, run:",
)
Build = Callable[[Source], Section]
Advise = Callable[[Source], Iterable[str]]
ADVICE: Sequence[Advise] = (beyond_exact, fastest_exact, sparse_over_exact, several_ranks)
MAX_ADVICE = 3
"""Recommendations of a first screen."""


class Kind(NamedTuple):
    """A kind of report.

    command: produces rows for it, with files of the checkout only; shown where no section has any.
    advice: recommendations of the first screen, the most important first.
    has_rows: the records have rows for it; if None, where a section has.
    """

    title: str
    sections: Sequence[Build]
    command: str
    has_rows: Callable[[Source], bool] | None = None
    advice: Sequence[Advise] = ADVICE


def build_document(name: str, kind: Kind, source: Source) -> Document:
    """Build a report: first screen, sections of the kind, failures, provenance."""
    own = [section(source) for section in kind.sections]
    has_rows = kind.has_rows(source) if kind.has_rows else any(one.has_content for one in own)
    notes = [f"Note: {note}" for note in source.notes]
    own = [replace(one, points=limit_findings(one.points)) for one in own]
    if not any(one.has_content for one in own):
        own = [Section("No results", _NO_RESULTS, code=[kind.command])]
    measured = rerun(source), settings(source), hardware(source), how_it_ran(source)
    technical = [replace(one, technical=True) for one in (*measured, *configs(source))]
    wrong, suspected = list(wrong_outputs(source)), list(suspicions(source))
    room = min(MAX_ADVICE, MAX_FINDINGS - len(wrong) - len(suspected))
    # the answer for lengths that were asked for is above; shorter runs say nothing about them
    advisers = () if find_answers(source) else kind.advice
    advice = islice((words for advise in advisers for words in advise(source)), room)
    first = _first_screen(source, own, [*wrong, *advice, *suspected])
    shown = [_without(one.limited(), first) for one in (*own, failures(source), *technical)]
    shown.append(_explain_columns(shown))
    details = [replace(one, is_detail=True) for one in shown if one.has_content]
    records, unstable = source.records, source.unstable  # the data does not keep the tables
    return Document(
        name,
        kind.title,
        [context(source), *notes],
        [*([first] if first.has_content else []), *details],
        lambda: samples_table(records, unstable),
        has_rows=has_rows,
        figures=key_figures(source),
    )


def _first_screen(source: Source, sections: Sequence[Section], findings: Sequence[str]) -> Section:
    """Return the section below the key figures: findings, the first chart, first rows."""
    tables = [_shorten(table, source) for section in sections for table in section.tables[:1]][:1]
    charts = [chart for section in sections for chart in section.charts][:1]
    paragraphs = list(filter(None, [never_ran(source)]))
    return Section("Answer", paragraphs, findings, tables, charts=charts)


def _shorten(table: Table, source: Source) -> Table:
    """Return at most MAX_ANSWER_ROWS rows, of one variant of each implementation if several ran."""
    variants = {
        name: (row.implementation, row.label)
        for row in [*source.rows, *source.maxima]
        for name in (row.label, row.name)
    }
    chosen: dict[str, str] = {}
    rows = []
    for row in table.rows:
        implementation, label = variants.get(str(row[0]), (str(row[0]), str(row[0])))
        if chosen.setdefault(implementation, label) == label:
            rows.append(row)
    rows = (rows if len(chosen) > 1 else list(table.rows))[:MAX_ANSWER_ROWS]
    if len(rows) == len(table.rows):
        return table
    cut = f"{len(rows)} of {len(table.rows):,} rows"
    return replace(table, title=f"{cut}: {table.title}" if table.title else cut, rows=tuple(rows))


def _without(section: Section, first: Section) -> Section:
    """Return a section without the chart of the first screen, and without all that it shows."""
    charts = [chart for chart in section.charts if chart not in first.charts]
    is_shown = not section.paragraphs and list(section.tables) == list(first.tables)
    return replace(section, charts=charts, tables=[] if is_shown else section.tables)


def _explain_columns(sections: Sequence[Section]) -> Section:
    """Build a table of the columns that are not self-explanatory, by heading."""
    columns = (column for one in sections for table in one.tables for column in table.columns)
    meanings = sorted({column.name: column.help for column in columns if column.help}.items())
    tables = [Table("", make_columns("Heading, Meaning"), tuple(meanings))] if meanings else []
    return Section("What the columns mean", tables=tables, technical=True)


# ---- the kinds -----------------------------------------------------------------------------------

_SWEEP = "longseq sweep configs/quickstart.yaml"
_KINDS = {
    "summary": Kind(
        "How many tokens attention takes here",
        [by_length, all_implementations, sparse, maxima, lengths, over_ranks, exponents],
        _SWEEP,
    ),
    "devices": Kind(
        "Many devices",
        [against_one, over_ranks],
        "longseq sweep configs/parallel.yaml",
        advice=[several_ranks, *ADVICE[:-1]],
    ),
    "extreme": Kind(
        "Extreme lengths",
        [all_implementations, maxima, sparse, lengths, exponents],
        "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99",
        lambda source: bool(source.maxima),
    ),
    "implementations": Kind(
        "Implementations side by side",
        [all_implementations, lengths, exponents],
        _SWEEP,
        lambda source: len({row.label for row in source.rows if row.time_s}) > 1,
    ),
    "scaling": Kind(
        "Scaling",
        [over_ranks, exponents, against_one],
        "longseq scaling --impl ring --impl ulysses --world-sizes 1,2",
        advice=[several_ranks, *ADVICE[:-1]],
    ),
    "capabilities": Kind(
        "What works here", [capabilities, against_one], _SWEEP, advice=[requirements]
    ),
}
for _name, _kind in _KINDS.items():
    KINDS.register(_name)(partial(build_document, _name, _kind))


# ---- reports of records --------------------------------------------------------------------------

ALL, AUTO = "all", "auto"
"""Names that mean several kinds: every kind, and every kind that the records have rows for."""


def write_documents(
    reports: Sequence[Document],
    out_dir: str | Path,
    formats: Sequence[str] = ("md", "csv"),
    charts: bool = True,
) -> list[Path]:
    """Write reports in each format into `out_dir`; return the paths of the main files.

    The folder is created if it is missing. A summary is `report.<format>`, another kind is
    `<kind>.<format>`. Markdown has its charts in a folder next to the main file.
    Raises UnknownNameError for an unknown format, and StoreError if `out_dir` can't be written.
    All reports are rendered before the first is written.
    """
    renderers = [FORMATS.get(name) for name in formats]
    shown = reports if charts else [report.without_charts() for report in reports]
    rendered = [render(report) for report in shown for render in renderers]
    try:
        return [_write(Path(out_dir), files) for files in rendered]
    except OSError as error:
        raise StoreError(f"report folder {out_dir} can't be written: {error.strerror}") from None


def documents(
    records: Sequence[Record],
    kinds: Sequence[str] = ("summary",),
    baseline: str | None = None,
    notes: Sequence[str] = (),
    configs: Mapping[str, str] | None = None,
) -> list[Document]:
    """Return reports as documents, not yet in a format. kinds: names of kinds, `all`, or `auto`.

    baseline: the label or implementation whose speed is 1.  notes: sentences for the top of each
    report, such as those from reading the records.  configs: texts of configs by path.
    Raises UnknownNameError for an unknown kind or baseline, StoreError if there is no record.
    """
    if not records:
        raise StoreError("there is no record to report on")
    names = [name for kind in kinds for name in (KINDS.names() if kind in (ALL, AUTO) else [kind])]
    builders = [KINDS.get(name) for name in dict.fromkeys(names)]
    source = Source(records, baseline, tuple(notes), configs or {})
    reports = [build(source) for build in builders]
    return [r for r in reports if AUTO not in kinds or r.kind in kinds or r.has_rows]


def _write(folder: Path, files: Files) -> Path:
    """Write the files of one report in one format."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            path.write_bytes(text)
            continue
        # a page has its texts cleaned in the template: its scripts must stay as they were hashed
        kept = text if name.endswith(".html") else keep_lines(text)
        path.write_text(kept, encoding="utf-8", errors="backslashreplace", newline="\n")
    return folder / next(iter(files))
