"""The kinds of reports: each has a title, key figures for its first screen, and sections.

The first chart and the first table of the sections are on the first screen too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from types import MappingProxyType

from longseq_bench.core.model import Outcome, Record
from longseq_bench.reports import key_figures as key
from longseq_bench.reports.base import KINDS, SECTIONS, Source
from longseq_bench.reports.document import (
    MAX_ANSWER_ROWS,
    MAX_FIGURES,
    Cell,
    Column,
    Document,
    KeyFigure,
    Section,
    Table,
)
from longseq_bench.reports.sections.at_a_glance import all_implementations
from longseq_bench.reports.sections.failures import failures, problems
from longseq_bench.reports.sections.gains import DENSE, ONE_RANK, where_it_pays
from longseq_bench.reports.sections.growth import exponents, minimum_sparsity, over_ranks
from longseq_bench.reports.sections.lengths import lengths
from longseq_bench.reports.sections.maxima import maxima, projected
from longseq_bench.reports.sections.modes import capabilities, errors
from longseq_bench.reports.sections.provenance import (
    configs,
    context,
    hardware,
    how_it_ran,
    rerun,
    settings,
)
from longseq_bench.reports.sections.ranks import against_one, bottleneck, each_rank, hangs
from longseq_bench.reports.sections.recommendations import fastest
from longseq_bench.reports.sections.segments import segments
from longseq_bench.reports.sections.sparse import sparse
from longseq_bench.reports.sections.speeds import relative
from longseq_bench.reports.sections.use_cases import uses
from longseq_bench.reports.wording import limit_findings

# ---- the tidy table: one row per measurement -----------------------------------------------------

_RECORD_COLUMNS = (
    "started_at", "host", "fingerprint", "commit", "purpose", "implementation", "options",
    "tokens", "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "model", "dtype", "causal",
    "mask", "mode", "new_tokens", "device", "world_size", "memory_budget", "time_budget", "threads",
    "repeats", "seed", "round", "key", "status", "reason", "phase", "wall_s", "processes",
    "predicted_tokens", "dense_source", "fit_only", "keep", "allocator", "requested_dense_kernel",
    "foreseen_peak_bytes", "foreseen_s", "unstable",
)  # fmt: skip
_MEASUREMENT_COLUMNS = (
    "measurement", "unit", "rank", "samples", "median", "smallest", "largest", "values",
)  # fmt: skip


def samples_table(
    records: Sequence[Record], unstable: Mapping[int, str] = MappingProxyType({})
) -> Table:
    """Return all raw samples (`values`, separated by spaces) with the fields that identify them.

    unstable: why the row of a record is unstable, by the record's id.
    A record without measurements has one row without values, so that failures are included.
    """
    columns = tuple(Column(name) for name in (*_RECORD_COLUMNS, *_MEASUREMENT_COLUMNS))
    rows = (row for r in records for row in _rows(r, unstable.get(id(r))))
    return Table("samples", columns, tuple(rows))


def _dense_source(outcome: Outcome) -> str | None:
    source = outcome.facts.get("dense") if outcome.samples("dense_time") else None
    return None if source is None else str(source)


def _rows(record: Record, unstable: str | None) -> Iterator[tuple[Cell, ...]]:
    trial, outcome, environment = record.trial, record.outcome, record.environment
    values = {
        "started_at": record.started_at,
        "wall_s": record.wall_s,
        "key": record.key,
        "host": environment.host,
        "fingerprint": environment.fingerprint,
        "commit": environment.commit,
        "purpose": record.purpose,
        "processes": record.processes,
        "predicted_tokens": record.predicted_tokens,
        "tokens": trial.workload.seq_len,
        **trial.workload.model_dump(exclude={"seq_len"}),
        "mask": trial.workload.visibility.text,
        **trial.model_dump(exclude={"workload", "options"}),
        "requested_dense_kernel": trial.requested_dense_kernel,
        "options": json.dumps(trial.options, sort_keys=True),
        "foreseen_peak_bytes": record.foreseen and record.foreseen.peak_bytes,
        "foreseen_s": record.foreseen and record.foreseen.seconds,
        "unstable": unstable,
        "status": outcome.status,
        "reason": outcome.reason,
        "phase": outcome.phase,
        "dense_source": _dense_source(outcome),
    }
    known = tuple(values[name] for name in _RECORD_COLUMNS)
    if not outcome.measurements:
        yield (*known, *[None] * len(_MEASUREMENT_COLUMNS))
    for measurement in outcome.measurements:
        samples = measurement.samples
        yield (
            *known, measurement.name, measurement.unit, measurement.rank, len(samples),
            median(samples) if samples else None, min(samples, default=None),
            max(samples, default=None), " ".join(map(repr, samples)),
        )  # fmt: skip


# ---- a report from its sections and those that all kinds share -----------------------------------

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


# ---- the kinds -----------------------------------------------------------------------------------

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
