"""Provenance: dates, machines, versions, how each trial ran, how to run it again."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from longseq_bench.core.model import Environment, Record
from longseq_bench.core.units import format_bytes, format_seconds
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Column, Section, Table


def dates(records: Sequence[Record]) -> str:
    """Build the section with the dates of the records."""
    first, last = min(r.started_at for r in records), max(r.started_at for r in records)
    return f"Measured {first}." if first == last else f"Measured from {first} to {last}."


def describe_machines(source: Source) -> Iterator[str]:
    """State that environments are not merged, if there are several."""
    if len(source.environments) > 1:
        names = ", ".join(source.machines.values())
        yield (
            f"The records come from {len(source.environments)} environments: {names}. "
            "Figures of different environments are never merged or compared."
        )


def hardware(source: Source) -> Section:
    """Build a table per machine: hardware, versions, load and commit."""
    tables = []
    seen: dict[str, list[Environment]] = {}
    for record in source.records:
        seen.setdefault(record.environment.fingerprint, []).append(record.environment)
    for fingerprint, environment in source.environments.items():
        of_it = seen[fingerprint]
        facts = tuple((name, value) for name, value in _facts(environment, of_it) if value)
        columns = (Column("What"), Column("Value"))
        name = source.machines[fingerprint]
        tables.append(Table(f"Machine {name}" if name else "", columns, facts))
    return Section("Hardware and versions", tables=tables)


def _facts(environment: Environment, seen: Sequence[Environment]) -> Iterator[tuple[str, str]]:
    e = environment
    yield "Host", e.host
    yield "System", e.os
    yield "CPU", f"{e.cpu}, {e.cores} cores, {format_bytes(e.memory_bytes)} memory"
    for gpu, count in Counter(e.gpus).items():
        yield "GPU", f"{count} × {gpu}" if count > 1 else gpu
    yield "Driver", e.driver or ""
    yield "Versions", f"longseq {e.longseq}, torch {e.torch}, Python {e.python}"
    yield "Commit", ", ".join(dict.fromkeys(s.commit for s in seen if s.commit))
    yield "Variables", ", ".join(f"{k}={v}" for k, v in sorted(e.variables.items()))
    loads = [s.load[0] for s in seen if s.load]
    yield "Load, 1 minute", f"{min(loads):.2f} to {max(loads):.2f}" if loads else ""
    clocks = [s.clock_mhz for s in seen if s.clock_mhz]
    yield "Clock", f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else ""
    yield "Fingerprint", e.fingerprint


def how_it_ran(source: Source) -> Section:
    """Build the table of facts that trials recorded: backend, meters, fall-backs."""
    said: dict[tuple[str, ...], dict[str, None]] = {}
    several = len(source.environments) > 1
    for record in source.records:
        machine = [source.machines[record.environment.fingerprint]] * several
        label = source.label(record.trial)
        for name, value in record.outcome.facts.items():
            if isinstance(value, (str, bool)):
                said.setdefault((*machine, label, name), {})[str(value)] = None
    rows = tuple((*which, "; ".join(values)) for which, values in said.items())
    machine_column = [Column("Machine")] * several
    columns = (*machine_column, Column("Implementation"), Column("What"), Column("Value"))
    return Section("How each ran", tables=[Table("", columns, rows)] if rows else [])


def configs(source: Source) -> Iterator[Section]:
    """Return the configs that were kept with the records."""
    for place, text in source.configs.items():
        yield Section(f"Config: {place}", code=text.splitlines())


def reproduce(source: Source) -> Section:
    """Build the section with versions, settings and commands of the records."""
    commands = list(dict.fromkeys(r.command for r in source.records if r.command))
    commits = dict.fromkeys(r.environment.commit for r in source.records if r.environment.commit)
    versions = dict.fromkeys(r.environment.longseq for r in source.records)
    said = f"With longseq {', '.join(versions)}"
    said += f", commit {', '.join(commits)}:" if commits else " (commit not recorded):"
    columns = (Column("Setting"), Column("Value"))
    return Section(
        "How to reproduce",
        [said if commands else said[:-1] + "; the command was not recorded."],
        tables=[Table("", columns, tuple(_settings(source.records)))],
        code=commands,
    )


def _settings(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    trials = [record.trial for record in records]

    def distinct(values: Iterable[Any], write: Callable[[Any], str] = str) -> str:
        return ", ".join("none" if v is None else write(v) for v in dict.fromkeys(values))

    yield "Repeats at most", distinct(t.repeats for t in trials)
    yield "Timed passes stop after", distinct((t.time_cap for t in trials), format_seconds)
    yield "Time budget a pass", distinct((t.time_budget for t in trials), format_seconds)
    yield "Memory budget a rank", distinct((t.memory_budget for t in trials), format_bytes)
    yield (
        "Threads a rank",
        distinct("torch's choice" if not t.threads else t.threads for t in trials),
    )
    yield "Rounds", _rounds(records)
    yield "Seeds", distinct(sorted({t.seed for t in trials}))


def _rounds(records: Sequence[Record]) -> str:
    """Return the least and the largest number of rounds of any sweep.

    A sweep is the trials of one command on one machine. Without a sweep, searches count.
    """
    swept = [record for record in records if record.purpose == "measure"]
    rounds: dict[tuple[str | None, str], int] = {}
    for record in swept or records:
        sweep = record.command, record.environment.fingerprint
        rounds[sweep] = max(rounds.get(sweep, 0), record.trial.round + 1)
    return " to ".join(map(str, sorted({min(rounds.values()), max(rounds.values())})))
