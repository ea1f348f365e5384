"""The tidy table behind every report: one row per measurement of a record on a rank."""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from longseq_bench.core.model import Outcome, Record
from longseq_bench.reports.document import Cell, Column, Table

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
