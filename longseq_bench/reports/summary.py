"""The report of a folder of records: a summary, a table a question, how to run it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from longseq_bench.model import Environment, Outcome, Record
from longseq_bench.reports.base import KINDS, Source
from longseq_bench.reports.document import Cell, Column, Document, Kind, Section, Table
from longseq_bench.reports.findings import findings, time_of
from longseq_bench.reports.groups import grouped, least_peak, spread_out, workload_words
from longseq_bench.reports.growth import growth, least_sparse
from longseq_bench.reports.ranks import each_rank, hangs, said_of_ranks
from longseq_bench.reports.samples import samples_table
from longseq_bench.reports.sparse import sparse
from longseq_bench.table import Row
from longseq_bench.units import format_bytes, format_seconds


class Field(NamedTuple):
    """A column of a table of rows, and how its value is taken from a row.

    always: shown although no row fills it.  ranks: only where a row of the table has several.
    """

    name: str
    kind: Kind
    value: Callable[[Row], Cell]
    always: bool = True
    ranks: bool = False


def _plain(name: str, kind: Kind, key: str, always: bool = True) -> Field:
    return Field(name, kind, lambda row: row[key], always)


def _of_ranks(name: str, kind: Kind, key: str) -> Field:
    return Field(name, kind, lambda row: row[key], False, True)


_LENGTHS = (
    _plain("Implementation", "text", "label"),
    _plain("Tokens", "tokens", "tokens"),
    _of_ranks("Ranks", "count", "world_size"),
    _of_ranks("Tokens a rank", "tokens", "tokens_per_rank"),
    _plain("Status", "text", "status"),
    Field("Time", "seconds", time_of),
    _plain("Samples", "count", "samples"),
    _of_ranks("Compute only", "seconds", "compute_time_s"),
    _of_ranks("Communication only", "seconds", "communication_time_s"),
    _of_ranks("Exposed", "share", "exposed_share"),
    _of_ranks("Speed-up", "ratio", "speedup"),
    _of_ranks("Efficiency", "share", "efficiency"),
    _of_ranks("Sent a rank", "bytes", "bytes_sent"),
    _plain("Peak memory", "bytes", "peak_bytes"),
    Field("Least peak", "bytes", least_peak, False, True),
    _of_ranks("Imbalance", "ratio", "imbalance"),
    _plain("Tokens/s", "count", "tokens_per_s"),
    _plain("Effective FLOP/s", "flop_rate", "effective_flops"),
    _plain("Max error", "error", "max_error"),
    _plain("Wire error", "error", "wire_error", False),
    _plain("Density asked", "share", "density_asked", False),
    _plain("Density achieved", "share", "density_achieved", False),
    Field("Uncovered", "share", lambda row: row["uncovered"] or None, False),
    Field("Zero rows", "share", lambda row: row["zero_rows"] or None, False),
    _plain("Speed", "ratio", "speed", False),
)
_MAXIMA = (
    _plain("Implementation", "text", "label"),
    _of_ranks("Ranks", "count", "world_size"),
    _plain("Max tokens", "tokens", "max_tokens"),
    _plain("Memory alone", "tokens", "fits_tokens", False),
    _plain("Elsewhere", "count", "elsewhere", False),
    Field("Times that", "ratio", lambda row: _beside(row), False),
    _of_ranks("Tokens a rank", "tokens", "tokens_per_rank"),
    _plain("First failure", "tokens", "first_failure"),
    _plain("Limited by", "text", "limited_by"),
    _plain("Phase", "text", "failure_phase"),
    _plain("Fraction of floor", "share", "fraction_of_floor"),
    _plain("Peak memory", "bytes", "peak_bytes"),
    Field("Least peak", "bytes", least_peak, False, True),
    _of_ranks("Imbalance", "ratio", "imbalance"),
    _plain("Bytes/token", "bytes", "bytes_per_token"),
    _plain("Predicted", "tokens", "predicted_tokens"),
    _plain("Runs", "count", "runs"),
    _plain("Confirmations", "count", "confirmations"),
)

_FAILED = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Ranks", "count"),
    Column("Asked for"), Column("Status"), Column("Phase"), Column("Reason"),
)  # fmt: skip
_MISSING = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Not measured"), Column("Reason"),
)  # fmt: skip


@KINDS.register("summary")
def build(source: Source) -> Document:
    """Everything a folder of records says. Every figure is computed from the records."""
    sections = [
        Section("Summary", points=findings(source)),
        _hardware(source),
        _lengths(source),
        sparse(source),
        _maxima(source),
        least_sparse(source),
        *growth(source),
        each_rank(source),
        _how_it_ran(source),
        _failures(source),
        *hangs(source),
        _reproduce(source),
    ]
    notes = [f"Note: {note}" for note in source.notes]
    return Document(
        title="How long a sequence attention takes here",
        paragraphs=[_dates(source.records), *_machines_said(source), *notes],
        sections=[s for s in sections if s.points or s.tables or s.code],
        data=samples_table(source.records),
    )


def _dates(records: Sequence[Record]) -> str:
    first, last = min(r.started_at for r in records), max(r.started_at for r in records)
    return f"Measured {first}." if first == last else f"Measured from {first} to {last}."


def _machines_said(source: Source) -> Iterator[str]:
    if len(source.environments) > 1:
        names = ", ".join(source.machines.values())
        yield (
            f"The records come from {len(source.environments)} environments: {names}. "
            "Figures of different environments are never merged or compared."
        )


def _hardware(source: Source) -> Section:
    tables = []
    for fingerprint, environment in source.environments.items():
        of_it = [r.environment for r in source.records if r.environment.fingerprint == fingerprint]
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


def _lengths(source: Source) -> Section:
    said = [
        "Time is the median; ± is the farther end of its 95 % interval (with fewer than 6 samples, "
        "of their range). Over ranks, time is the slowest rank's and memory the largest. "
        "A dash is a value that was not measured; Failures says why."
    ]
    if source.baseline:
        said.append(
            f"Speed is the time of {source.baseline} over the row's, on the same workload, and on "
            "as many ranks where it was run so, else on the fewest."
        )
    return Section(
        "Lengths swept",
        said + said_of_ranks(source.rows),
        tables=[_rows_table(g, source, _LENGTHS) for g in grouped(source.rows)],
    )


def _maxima(source: Source) -> Section:
    said = [
        "Max tokens is the longest length of which every run passed, first failure the shortest "
        "failed one above it. Fraction of floor: the bytes that no exact attention can do without "
        "at that length, over the budget. Confirmations are further passes in fresh processes."
    ]
    if spread_out(source.maxima):
        said.append(
            "With several ranks: max tokens are those of all ranks, tokens a rank the most that "
            "one holds; the floor is set against the budgets of all ranks together; budget, peak "
            "and bytes/token (peak over all tokens) are a rank's, imbalance is the largest peak "
            "over the least."
        )
    said += list(_settings_said(source))
    groups = grouped(source.maxima)
    return Section(
        "Longest lengths", said, tables=[_rows_table(g, source, _MAXIMA) for g in groups]
    )


def _settings_said(source: Source) -> Iterator[str]:
    """What settings make of a maximum that must not be taken for another."""
    rows = source.maxima
    if any(row["fit_only"] for row in rows):
        yield (
            "Fits only, and memory alone: passes whose loops were cut short, under the same "
            "budget; whether memory is there is known, and nothing was checked or timed."
        )
    if any(row["keep"] == "inputs" for row in rows):
        yield (
            "Recomputed: between forward and backward only q, k and v are kept; what forward left "
            "is computed again."
        )
    if any(row["keep"] == "nothing" for row in rows):
        yield (
            "Over its inputs: results lie where inputs did that are no longer needed, so it takes "
            "less than the floor, which counts both."
        )
    if any(row["options"].get("offload", "none") != "none" for row in rows):
        yield (
            "Offloaded: q, k, v and the output lie in the host's memory, so the device's budget "
            "and the floor don't bound their length."
        )
    if any(row["elsewhere"] is not None for row in rows):
        yield f"Elsewhere: {source.elsewhere_said}."


def _beside(row: Row) -> float | None:
    """Of what was run as a whole and left its inputs alone."""
    alike = row["elsewhere"] and not row["fit_only"] and row["keep"] != "nothing"
    return row["max_tokens"] / row["elsewhere"] if alike else None


def _rows_table(group: Sequence[Row], source: Source, fields: Sequence[Field]) -> Table:
    """A table of a group of rows; columns that no row fills are left out unless always shown."""
    several = spread_out(group)
    possible = [f for f in fields if several or not f.ranks]
    shown = [f for f in possible if f.always or any(f.value(row) is not None for row in group)]
    title = workload_words(group[0], source.machines)
    rows = tuple(tuple(f.value(row) for f in shown) for row in group)
    return Table(title[0].upper() + title[1:], tuple(Column(f.name, f.kind) for f in shown), rows)


def _how_it_ran(source: Source) -> Section:
    """Words that the trials said of themselves: backend, meters, what a fall-back would hide."""
    said: dict[tuple[str, str], list[str]] = {}
    for record in source.records:
        for name, value in record.outcome.facts.items():
            if isinstance(value, (str, bool)):
                values = said.setdefault((source.label(record.trial), name), [])
                if str(value) not in values:
                    values.append(str(value))
    rows = tuple((label, name, "; ".join(values)) for (label, name), values in said.items())
    columns = (Column("Implementation"), Column("What"), Column("Value"))
    return Section("How each ran", tables=[Table("", columns, rows)] if rows else [])


def _failures(source: Source) -> Section:
    tables = [
        _counted("Runs that were not ok", _FAILED, _failed(source), source),
        _counted("Figures that are missing from ok rows", _MISSING, _missing(source), source),
    ]
    return Section("Failures", tables=[table for table in tables if table.rows])


def _counted(
    title: str,
    columns: Sequence[Column],
    found: Iterable[tuple[Record, tuple[Cell, ...]]],
    source: Source,
) -> Table:
    """Equal rows once with their count; which machine is said where there are several."""
    several = len(source.environments) > 1
    machine = (Column("Machine"),) if several else ()
    rows = Counter(
        (*[source.machines[record.environment.fingerprint]] * several, *cells)
        for record, cells in found
    )
    shown = (*machine, *columns, Column("Runs", "count"))
    return Table(title, shown, tuple((*row, count) for row, count in rows.items()))


def _failed(source: Source) -> Iterator[tuple[Record, tuple[Cell, ...]]]:
    for record in source.records:
        trial, outcome = record.trial, record.outcome
        if outcome.status != "ok":
            what = (source.label(trial), trial.workload.seq_len, trial.world_size, record.purpose)
            reason = outcome.reason or "none was recorded"
            yield record, (*what, outcome.status, outcome.phase, reason)


def _missing(source: Source) -> Iterator[tuple[Record, tuple[Cell, ...]]]:
    for record in source.records:
        trial, outcome = record.trial, record.outcome
        if outcome.status != "ok" or record.purpose != "measure":
            continue
        untimed = "no timed pass was recorded" if trial.repeats else "none was asked (repeats 0)"
        wanted = {
            "time": untimed,
            "peak": outcome.facts.get("heap") or "the memory meter gave no peak",
            "flops": "the implementation stated no FLOPs",
            "max_error": "the output's error was not recorded",
        }
        if trial.world_size > 1:
            apart = "no pass without communication was recorded" if trial.repeats else untimed
            wanted |= {"compute_time": apart, "bytes_sent": "no bytes were counted"}
        if min(outcome.samples("density_achieved"), default=1.0) < 1:
            wanted["dense_time"] = untimed if not trial.repeats else _no_dense(outcome)
        for what, reason in wanted.items():
            if not outcome.samples(what):
                yield record, (source.label(trial), trial.workload.seq_len, what, str(reason))


def _no_dense(outcome: Outcome) -> str:
    return str(outcome.facts.get("dense", "no dense pass was recorded"))


def _reproduce(source: Source) -> Section:
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
    yield "Rounds", str(max(t.round for t in trials) + 1)
    yield "Seeds", distinct(sorted({t.seed for t in trials}))
