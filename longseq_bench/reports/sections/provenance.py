"""Provenance: dates, machines, versions, how each trial ran, how to run it again."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from longseq_bench.analysis.labels import option_text
from longseq_bench.analysis.runs import group_by
from longseq_bench.core.model import Environment, Record
from longseq_bench.core.units import format_bytes, format_seconds
from longseq_bench.reports.base import Source
from longseq_bench.reports.columns import make_columns
from longseq_bench.reports.document import Cell, Section, Table, format_cell
from longseq_bench.reports.groups import format_range, join_names


def context(source: Source) -> str:
    """Return the first line of a report: machine, dates, and what is equal in all rows."""
    first, last = (some(r.started_at[:10] for r in source.records) for some in (min, max))
    dates = first if first == last else f"{first} to {last}"
    one, *others = source.environments.values()
    if others:
        names = join_names(source.machines.values())
        machine = f"{len(others) + 1} environments, never compared: {names}"
    else:
        gpus = (f"{count} × {gpu}" for gpu, count in Counter(one.gpus).items())
        machine = f"{', '.join(gpus) or f'{one.cpu}, {one.cores} cores'} ({one.host})"
    return " ".join(filter(None, (f"{machine}, {dates}.", source.context)))


def hardware(source: Source) -> Section:
    """Build a table per machine: hardware, versions, load and commit."""
    tables = []
    machines = group_by(source.records, lambda record: record.environment.fingerprint)
    for fingerprint, found in machines.items():
        times = [record.started_at for record in found]
        environments = [record.environment for record in found]
        facts = tuple((name, value) for name, value in _facts(environments) if value)
        facts += ("First trial", min(times)), ("Last trial", max(times))
        name = source.machines[fingerprint]
        title = f"Machine {name}" if name else ""
        tables.append(Table(title, make_columns("What, Value"), facts))
    return Section("Hardware and versions", tables=tables)


def _facts(environments: Sequence[Environment]) -> Iterator[tuple[str, str]]:
    last = environments[-1]

    def ends(values: Iterable[float | None], form: str) -> str:
        known = [value for value in values if value]
        return f"{min(known):{form}} to {max(known):{form}}" if known else ""

    yield "Host", last.host
    yield "System", last.os
    yield "CPU", f"{last.cpu}, {last.cores} cores, {format_bytes(last.memory_bytes)} memory"
    for gpu, count in Counter(last.gpus).items():
        yield "GPU", f"{count} × {gpu}" if count > 1 else gpu
    yield "Trials side by side", str(last.workers or "")
    yield "Driver", last.driver or ""
    limits = Counter(watts for watts in last.power_limits_w if watts)
    yield "Power limit", ", ".join(f"{count} × {watts:.0f} W" for watts, count in limits.items())
    yield "Versions", f"longseq {last.longseq}, torch {last.torch}, Python {last.python}"
    yield "CUDA libraries", ", ".join(f"{k} {v}" for k, v in last.gpu_libraries.items())
    yield "Commit", ", ".join(dict.fromkeys(one.commit for one in environments if one.commit))
    yield "Variables", ", ".join(f"{k}={v}" for k, v in sorted(last.variables.items()))
    yield "Load, 1 minute", ends((one.load[0] for one in environments if one.load), ".2f")
    yield "Clock, MHz", ends((one.clock_mhz for one in environments), ".0f")
    clocks = (mhz for one in environments for mhz in one.sm_clocks_mhz)
    yield "SM clock before trials, MHz", ends(clocks, ".0f")
    yield "Fingerprint", last.fingerprint


def how_it_ran(source: Source) -> Section:
    """Build the table of options and of facts that trials recorded: backend, meters."""
    facts: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    for record in source.records:
        which = record.environment.fingerprint, source.label(record.trial)
        if options := record.trial.options:
            words = ", ".join(f"{name}={option_text(value)}" for name, value in options.items())
            facts[*which, "options"][words] = None
        for name, value in record.outcome.facts.items():
            if isinstance(value, (str, bool)):
                facts[*which, name][str(value)] = None
    rows = ((*key, "; ".join(values)) for key, values in facts.items())
    table = source.table("", "Implementation, What, Value", rows)
    return Section("How each ran", tables=[table] if facts else [])


def configs(source: Source) -> Iterator[Section]:
    """Build a section with the text of each config that was stored with the records."""
    for place, text in source.configs.items():
        yield Section(f"Config: {place}", code=text.splitlines())


def rerun(source: Source) -> Section:
    """Build the section with the commands of the records, after the version that ran them."""

    def describe(record: Record) -> str:
        found = record.environment
        commit = f"commit {found.commit}" if found.commit else "its commit was not recorded"
        return f"longseq {found.longseq}, {commit}"

    code: list[str] = []
    for version, records in group_by(source.records, describe).items():
        by_command = group_by(records, lambda r: r.command or "# its command was not recorded")
        commands = (_with_limit(text, some) for text, some in by_command.items())
        code += [*[""] * bool(code), f"# {version}", *commands]
    return Section("How to run it again", code=code)


def _with_limit(command: str, records: Sequence[Record]) -> str:
    """Return the command of a search with the time limit that its trials had by default."""
    limits = {r.trial.time_budget for r in records if r.purpose != "measure"} - {None}
    is_said = "--time-budget" in command or not command.startswith("longseq")
    return command if is_said or len(limits) != 1 else f"{command} --time-budget {limits.pop():g}s"


def settings(source: Source) -> Section:
    """Build the section on settings, and on how outputs were checked."""
    rows = tuple(_settings(source.records, " a rank" if source.is_parallel else ""))
    tables = [Table("", make_columns("Setting, Value"), rows), *_check_tables(source)]
    explanation = []
    errors = [error for error in source.errors if error is not None]
    if errors:
        runs = "all" if source.is_all_checked else f"{len(errors):,} of {len(source.errors):,}"
        explanation.append(
            f"Outputs of {runs} runs that were ok were compared with a float64 reference; the "
            f"largest error is {format_cell(max(errors), 'error')}."
        )
    explanation.append(
        "±: distance from the median to the farther bound of its 95 % interval; of fewer than six "
        "samples, to the farther end of their range."
    )
    return Section("Settings and checks", explanation, tables=tables)


def _settings(records: Sequence[Record], share: str) -> Iterator[tuple[str, str]]:
    budgets = attrgetter("repeats", "time_cap", "time_budget", "memory_budget", "threads", "seed")
    trials = list({budgets(record.trial): record.trial for record in records}.values())

    def distinct(values: Iterable[Any], write: Callable[[Any], str] = str) -> str:
        return ", ".join("none" if v is None else write(v) for v in dict.fromkeys(values))

    processes = sum(record.processes for record in records)
    took = format_seconds(sum(record.wall_s for record in records))
    yield "Runs", f"{len(records):,} runs in {processes:,} processes, {took}"
    outcomes = Counter(record.outcome.status for record in records).most_common()
    yield "Outcomes", ", ".join(f"{count:,} {status}" for status, count in outcomes)
    yield "Repeats at most", format_range([t.repeats for t in trials], "{:.0f}".format)
    yield "Timed passes stop after", distinct((t.time_cap for t in trials), format_seconds)
    yield "Time budget a pass", distinct((t.time_budget for t in trials), format_seconds)
    yield f"Memory budget{share}", distinct((t.memory_budget for t in trials), format_bytes)
    yield f"Threads{share}", distinct(t.threads or "torch's choice" for t in trials)
    yield "Rounds", str(1 + max(record.trial.round for record in records))
    yield "Seeds", distinct(sorted({t.seed for t in trials}))


# ---- what was checked of each implementation -----------------------------------------------------

_CHECKED = (
    "Implementation, Dtype, Mode, Runs: count, Rows compared, Every row with, Timed passes: count, "
    "Max error: error, Error of allowed: share, Bias: error"
)


def _check_tables(source: Source) -> list[Table]:
    """Return the table of what was checked; none for records that don't state it."""

    def kind(record: Record) -> Hashable:
        w = record.trial.workload
        return record.environment.fingerprint, source.label(record.trial), w.dtype, w.mode

    ok = (record for record in source.records if record.outcome.status == "ok")
    groups = group_by((r for r in ok if r.outcome.samples("checked_rows")), kind).values()
    rows = (_row(source, some) for some in groups)
    return [source.table("What was checked", _CHECKED, rows)] if groups else []


def _row(source: Source, records: Sequence[Record]) -> tuple[Cell, ...]:
    trial = records[0].trial
    compared = [r.outcome.largest("checked_rows") or 0.0 for r in records]
    tokens = [r.trial.workload.seq_len for r in records]
    stated = [r.outcome.facts.get("every_row_checked") for r in records]
    lists = [names for names in stated if isinstance(names, (list, tuple))]
    inputs = [name for names in lists for name in names if isinstance(name, str)]
    passes = sum(r.outcome.largest("checked_passes") or 0.0 for r in records)
    count, of = (format_range(some, "{:,.0f}".format) for some in (compared, tokens))
    names = "max_error", "error_of_allowed", "bias"
    known = ([v for r in records if (v := r.outcome.largest(name)) is not None] for name in names)
    errors = (max(values, default=None) for values in known)
    place = records[0].environment.fingerprint
    what = place, source.label(trial), trial.workload.dtype, trial.workload.mode, len(records)
    each = ", ".join(dict.fromkeys(inputs)) or None
    return (*what, f"{count} of {of}", each, round(passes), *errors)
