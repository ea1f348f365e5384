"""The kinds of reports: each has a title and sections.

`build_document` puts a kind's sections, those that all kinds share and the tidy table (one row per
measurement) together. The first chart and the first table of the sections are on the first screen.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from longseq_bench.core.model import Record
from longseq_bench.reports.base import KINDS, SECTIONS, Source
from longseq_bench.reports.columns import make_columns
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    MAX_CHARTS,
    Cell,
    Column,
    Document,
    Section,
    Table,
)
from longseq_bench.reports.groups import limit_findings, split_names
from longseq_bench.reports.sections.at_a_glance import all_implementations, key_figures
from longseq_bench.reports.sections.failures import failures, problems
from longseq_bench.reports.sections.gains import ONE_RANK, where_it_pays
from longseq_bench.reports.sections.growth import exponents, minimum_sparsity, over_ranks
from longseq_bench.reports.sections.lengths import lengths, maxima, projected
from longseq_bench.reports.sections.modes import capabilities
from longseq_bench.reports.sections.provenance import (
    configs,
    context,
    hardware,
    how_it_ran,
    rerun,
    settings,
)
from longseq_bench.reports.sections.ranks import against_one, bottleneck, each_rank
from longseq_bench.reports.sections.speeds import fastest, relative, sparse

# ---- the tidy table: one row per measurement -----------------------------------------------------

_FIELDS = split_names(
    "started_at environment.host environment.fingerprint environment.commit purpose "
    "trial.implementation trial.options trial.workload.seq_len trial.workload.batch "
    "trial.workload.heads trial.workload.kv_heads trial.workload.head_dim "
    "trial.workload.v_head_dim trial.workload.model trial.workload.dtype trial.workload.causal "
    "trial.workload.visibility.text trial.workload.mode trial.workload.new_tokens trial.device "
    "trial.world_size trial.memory_budget trial.time_budget trial.threads trial.repeats "
    "trial.seed trial.round key outcome.status outcome.reason outcome.phase wall_s processes "
    "predicted_tokens outcome.facts trial.fit_only trial.keep trial.allocator "
    "trial.requested_dense_kernel foreseen foreseen"
)
_NAMES = {"seq_len": "tokens", "text": "mask", "facts": "dense_source"}
_HEADINGS = [_NAMES.get(name, name) for name in (path.rpartition(".")[2] for path in _FIELDS)]
_HEADINGS[-2:] = ["foreseen_peak_bytes", "foreseen_s", "unstable"]
_MEASURED = split_names("measurement unit rank samples median smallest largest values")
_fields = attrgetter(*_FIELDS)


def samples_table(
    records: Sequence[Record], unstable: Mapping[int, str] = MappingProxyType({})
) -> Table:
    """Return all raw samples (`values`, separated by spaces) with the fields that identify them.

    unstable: why the row of a record is unstable, by the record's id.
    A record without measurements has one row without values, so that failures are included.
    """
    columns = tuple(map(Column, (*_HEADINGS, *_MEASURED)))
    rows = (row for r in records for row in _rows(r, unstable.get(id(r))))
    return Table("samples", columns, tuple(rows))


def _rows(record: Record, unstable: str | None) -> Iterator[tuple[Cell, ...]]:
    outcome, foreseen = record.outcome, record.foreseen
    values = dict(zip(_HEADINGS, _fields(record), strict=False))
    dense = outcome.facts.get("dense") if outcome.samples("dense_time") else None
    values |= {
        "options": json.dumps(record.trial.options, sort_keys=True),
        "dense_source": None if dense is None else str(dense),
        "foreseen_peak_bytes": foreseen and foreseen.peak_bytes,
        "foreseen_s": foreseen and foreseen.seconds,
        "unstable": unstable,
    }
    if not outcome.measurements:
        yield (*values.values(), *[None] * len(_MEASURED))
    for measurement in outcome.measurements:
        samples = measurement.samples
        middle = median(samples) if samples else None
        ends = min(samples, default=None), max(samples, default=None)
        what = measurement.name, measurement.unit, measurement.rank, len(samples)
        yield (*values.values(), *what, middle, *ends, " ".join(map(repr, samples)))


# ---- a report from its sections and those that all kinds share -----------------------------------

_NO_RESULTS = (
    "These records have no rows for this kind of report. `longseq report FOLDER --kind auto` "
    "writes every kind that they have rows for.",
    "To produce results for this kind, run:",
)
Build = Callable[[Source], Section]


class Kind(NamedTuple):
    """A kind of report.

    command: produces rows for it, with files of the checkout only; shown where no section has any.
    has_rows: the records have rows for it; if None, where a section has.
    """

    title: str
    sections: Sequence[Build]
    command: str
    has_rows: Callable[[Source], bool] | None = None


def build_document(name: str, kind: Kind, source: Source) -> Document:
    """Build a report: first screen, sections of the kind, registered ones, failures, provenance."""
    own = [section(source) for section in kind.sections]
    has_rows = kind.has_rows(source) if kind.has_rows else any(one.has_content for one in own)
    added = [section for section in SECTIONS.names() if section.partition(".")[0] == name]
    broken = {one: reason for one in added if (reason := SECTIONS.unavailable_reason(one))}
    own += [SECTIONS.get(section)(source) for section in added if section not in broken]
    notes = [f"Note: {note}" for note in source.notes]
    notes += [f"Note: section {one} is missing: {reason}" for one, reason in broken.items()]
    own = [replace(one, points=limit_findings(one.points)) for one in own]
    if not any(one.has_content for one in own):
        own = [Section("No results", _NO_RESULTS, code=[kind.command])]
    measured = rerun(source), settings(source), hardware(source), how_it_ran(source)
    technical = [replace(one, technical=True) for one in (*measured, *configs(source))]
    first = _first_screen(own, limit_findings(problems(source)))
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


def _first_screen(sections: Sequence[Section], findings: Sequence[str]) -> Section:
    """Return the section below the key figures: what to distrust, the first chart, first rows."""
    tables = [table for section in sections for table in section.tables][:1]
    if tables and len(tables[0].rows) > MAX_ANSWER_ROWS:
        table = tables[0]
        cut = f"{MAX_ANSWER_ROWS} of {len(table.rows):,} rows"
        title = f"{cut}: {table.title}" if table.title else cut
        tables = [replace(table, title=title, rows=table.rows[:MAX_ANSWER_ROWS])]
    charts = [chart for section in sections for chart in section.charts][:1]
    return Section("Answer", points=findings, tables=tables, charts=charts)


def _without(section: Section, first: Section) -> Section:
    """Return a section without the chart of the first screen, and without all that it shows."""
    charts = [chart for chart in section.charts if chart not in first.charts]
    paragraphs = [*section.paragraphs]
    if len(section.charts) >= MAX_CHARTS:
        paragraphs.append(f"At most {MAX_CHARTS} charts are drawn; the tables have more.")
    is_shown = not paragraphs and list(section.tables) == list(first.tables)
    tables = [] if is_shown else section.tables
    return replace(section, paragraphs=paragraphs, charts=charts, tables=tables)


def _explain_columns(sections: Sequence[Section]) -> Section:
    """Build a table of the columns that are not self-explanatory, by heading."""
    columns = (column for one in sections for table in one.tables for column in table.columns)
    meanings = sorted({column.name: column.help for column in columns if column.help}.items())
    tables = [Table("", make_columns("Heading, Meaning"), tuple(meanings))] if meanings else []
    return Section("What the columns mean", tables=tables, technical=True)


# ---- the kinds -----------------------------------------------------------------------------------

_SWEEP = "longseq sweep configs/quickstart.yaml"
_ranks_pay: Build = partial(where_it_pays, references=[ONE_RANK])
_KINDS = {
    "summary": Kind(
        "How many tokens attention takes here",
        [all_implementations, fastest, sparse, maxima, lengths, minimum_sparsity, over_ranks]
        + [exponents, each_rank],
        _SWEEP,
    ),
    "devices": Kind(
        "Many devices",
        [against_one, over_ranks, each_rank, _ranks_pay],
        "longseq sweep configs/parallel.yaml",
    ),
    "extreme": Kind(
        "Extreme lengths",
        [all_implementations, maxima, sparse, fastest, where_it_pays, lengths, minimum_sparsity]
        + [exponents, projected],
        "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99",
        lambda source: bool(source.maxima),
    ),
    "implementations": Kind(
        "Implementations side by side",
        [relative, exponents, where_it_pays],
        _SWEEP,
        lambda source: len({row.label for row in source.rows if row.time_s}) > 1,
    ),
    "scaling": Kind(
        "Scaling",
        [over_ranks, exponents, bottleneck, _ranks_pay],
        "longseq scaling --impl ring --impl ulysses --world-sizes 1,2",
    ),
    "capabilities": Kind("What works here", [capabilities, where_it_pays, against_one], _SWEEP),
}
for _name, _kind in _KINDS.items():
    KINDS.register(_name)(partial(build_document, _name, _kind))
