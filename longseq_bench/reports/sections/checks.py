"""List what was checked of each implementation: rows, passes, errors with their bounds, bias."""

from collections.abc import Hashable, Iterator, Sequence

from longseq_bench.analysis.runs import group_by
from longseq_bench.core.model import Record
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Table
from longseq_bench.reports.wording import format_range

_COLUMNS = (
    Column("Implementation", "text"), Column("Dtype", "text"), Column("Mode", "text"),
    Column("Runs", "count"), Column("Rows compared", "text"), Column("Every row with", "text"),
    Column("Timed passes", "count"), Column("Max error", "error"),
    Column("Error of allowed", "share"), Column("Bias", "error"),
)  # fmt: skip


def method(source: Source) -> Iterator[str]:
    """Explain the table."""
    if _checked(source):
        yield (
            "Rows compared: output rows of each head next to float64, of all; gradients at these "
            "rows. Every row with: inputs whose results are known. Error of allowed: the largest "
            "error over its bound. Bias: distance of the slope on float64 from 1. docs: What the "
            "check can and cannot see."
        )


def tables(source: Source) -> list[Table]:
    """Return the table of what was checked; none for records that don't state it."""

    def kind(record: Record) -> Hashable:
        w = record.trial.workload
        return (*source.machine_cell(record), source.label(record.trial), w.dtype, w.mode)

    groups = group_by(_checked(source), kind).values()
    rows = tuple((*source.machine_cell(some[0]), *_row(source, some)) for some in groups)
    columns = (*source.machine_column, *_COLUMNS)
    return [Table("What was checked", columns, rows)] if rows else []


def _checked(source: Source) -> list[Record]:
    """Return the ok runs that state which rows were compared."""
    return [
        r for r in source.records if r.outcome.status == "ok" and r.outcome.samples("checked_rows")
    ]


def _row(source: Source, records: Sequence[Record]) -> tuple[Cell, ...]:
    trial = records[0].trial
    compared = [r.outcome.largest("checked_rows") or 0.0 for r in records]
    tokens = [r.trial.workload.seq_len for r in records]
    stated = [r.outcome.facts.get("every_row_checked") for r in records]
    lists = [names for names in stated if isinstance(names, (list, tuple))]
    inputs = [name for names in lists for name in names if isinstance(name, str)]
    passes = sum(r.outcome.largest("checked_passes") or 0.0 for r in records)
    count, of = (format_range(some, "{:,.0f}".format) for some in (compared, tokens))
    return (
        source.label(trial), trial.workload.dtype, trial.workload.mode, len(records),
        f"{count} of {of}", ", ".join(dict.fromkeys(inputs)) or None, round(passes),
        *(_worst(records, name) for name in ("max_error", "error_of_allowed", "bias")),
    )  # fmt: skip


def _worst(records: Sequence[Record], name: str) -> float | None:
    known = [value for r in records if (value := r.outcome.largest(name)) is not None]
    return max(known, default=None)
