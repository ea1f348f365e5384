"""Failed runs, and figures that are missing although the run was ok, each with its reason."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from longseq_bench.core.model import Outcome, Record
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Section, Table

_FAILED = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Ranks", "count"),
    Column("Asked for"), Column("Status"), Column("Phase"), Column("Reason"),
)  # fmt: skip
_MISSING = (
    Column("Implementation"), Column("Tokens", "tokens"), Column("Not measured"), Column("Reason"),
)  # fmt: skip


def failures(source: Source) -> Section:
    """Build the section on failed runs and figures that ok rows lack, with equal rows counted."""
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
    """Count equal rows; the machine is a column where there are several."""
    several = len(source.environments) > 1
    machine = (Column("Machine"),) if several else ()
    rows = Counter(
        (source.machines[record.environment.fingerprint], *cells) if several else cells
        for record, cells in found
    )
    shown = (*machine, *columns, Column("Runs", "count"))
    return Table(title, shown, tuple((*row, count) for row, count in rows.items()))


def _failed(source: Source) -> Iterator[tuple[Record, tuple[Cell, ...]]]:
    for record in source.records:
        trial, outcome = record.trial, record.outcome
        if outcome.status != "ok":
            what = (
                _label(source, record),
                trial.workload.seq_len,
                trial.world_size,
                record.purpose,
            )
            reason = outcome.reason or "none was recorded"
            yield record, (*what, outcome.status, outcome.phase, reason)


def _label(source: Source, record: Record) -> str:
    """Return the label; in a search for the least sparsity also the sparsity of the run."""
    label, sparsity = source.label(record.trial), record.trial.options.get("sparsity")
    return f"{label} sparsity={sparsity}" if record.purpose == "density" else label


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
            samples = outcome.samples(what)
            if not all(map(math.isfinite, samples)):
                some = any(map(math.isfinite, samples))
                reason = f"{'some of ' * some}its samples are not finite"
            elif samples:
                continue
            yield record, (source.label(trial), trial.workload.seq_len, what, str(reason))


def _no_dense(outcome: Outcome) -> str:
    return str(outcome.facts.get("dense", "no dense pass was recorded"))
