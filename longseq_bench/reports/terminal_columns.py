"""Tables of rows for the terminal, from the declarations of the rows' fields."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longseq_bench.analysis.fields import fields_of
from longseq_bench.analysis.row import Row
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_share
from longseq_bench.reports.document import Cell, Column, Kind, Table
from longseq_bench.reports.fields import time_with_interval
from longseq_bench.reports.groups import capitalize_first, describe_workload, has_several_ranks
from longseq_bench.reports.outcome_text import name_status

SWEEP_FIELDS = (
    "tokens", "world_size", "time_s", "peak_bytes", "speed", "speedup", "exposed_share",
    "token_density", "share_of_ideal", "efficiency", "effective_flops", "bytes_sent",
    "imbalance", "tokens_per_rank", "max_error",
)  # fmt: skip
"""The most important first; a narrow terminal leaves out the last ones."""
SEARCH_FIELDS = (
    "max_tokens", "world_size", "first_failure", "limited_by", "fits_tokens", "fraction_of_floor",
    "peak_bytes", "tokens_per_rank", "imbalance", "runs",
)  # fmt: skip
_RANK_FIELDS = frozenset({
    "world_size", "speedup", "efficiency", "tokens_per_rank", "imbalance", "bytes_sent",
    "exposed_share",
})  # fmt: skip
_EXPLAINED = (
    "speedup", "exposed_share", "efficiency", "token_density", "share_of_ideal",
    "fraction_of_floor", "fits_tokens",
)  # fmt: skip
_COMPUTED_MARK = "†"


@dataclass(frozen=True)
class ValueColumn:
    """A column, and the function that takes its value from an item.

    priority: as in Column.  of_ranks: only where rows ran on several ranks.
    """

    heading: str
    kind: Kind
    value: Callable[[Any], Cell]
    priority: int | None = None
    of_ranks: bool = False


def build_table(
    title: str, columns: Sequence[ValueColumn], items: Sequence[Any], keep_empty: bool = False
) -> Table:
    """Return a table with a row per item; columns without any value are left out."""
    cells = [[column.value(item) for column in columns] for item in items]
    kept = [
        i for i in range(len(columns)) if keep_empty or any(row[i] is not None for row in cells)
    ]
    headings = tuple(Column(columns[i].heading, columns[i].kind, columns[i].priority) for i in kept)
    return Table(title, headings, tuple(tuple(row[i] for i in kept) for row in cells))


def row_columns(
    row_type: type, names: Sequence[str], others: Mapping[str, ValueColumn] | None = None
) -> list[ValueColumn]:
    """Return the columns of some fields of a row class, the most important first.

    others: columns by name that are no fields.
    """
    declared, columns = fields_of(row_type), dict(others or {})
    for name in names:
        if name not in columns:
            field = declared[name]
            columns[name] = ValueColumn(
                field.heading, field.kind, _getter(name), of_ranks=name in _RANK_FIELDS
            )
    return [replace(columns[name], priority=len(names) - i) for i, name in enumerate(names)]


def row_table(
    rows: Sequence[Row], columns: Sequence[ValueColumn], machines: Mapping[str, str],
    keep_empty: bool = False,
) -> Table:  # fmt: skip
    """Return a table of rows of one workload, which is its title; labels are the first column."""
    several = keep_empty or has_several_ranks(rows)
    label = ValueColumn("Implementation", "text", lambda row: row.label)
    shown = [label, *(column for column in columns if several or not column.of_ranks)]
    title = capitalize_first(describe_workload(rows[0], machines))
    return build_table(title, shown, rows, keep_empty)


def explain(row_type: type, tables: Iterable[Table]) -> list[str]:
    """Return a sentence on each column of the tables that is not self-explanatory."""
    shown = {column.name for table in tables for column in table.columns}
    declared = (fields_of(row_type)[name] for name in _EXPLAINED if name in fields_of(row_type))
    lines = [f"{one.heading}: {one.help}" for one in declared if one.heading in shown]
    if any(str(cell).endswith(_COMPUTED_MARK) for t in tables for row in t.rows for cell in row):
        lines.append(f"{_COMPUTED_MARK}: the dense time was computed from some of its rows.")
    return lines


def _getter(name: str) -> Callable[[Any], Cell]:
    if name == "time_s":
        return time_or_status
    if name == "share_of_ideal":
        return _share_of_ideal
    return lambda row: getattr(row, name)


def time_or_status(row: Any) -> Cell:
    """Return the median time with its interval (s), or how the trial ended instead."""
    failed = isinstance(row, SweepRow) and row.status != "ok"
    return name_status(row.status) if failed else time_with_interval(row)


def _share_of_ideal(row: SweepRow) -> Cell:
    """Return the share, marked if no complete dense pass was timed."""
    if row.share_of_ideal is None or row.dense_source == "measured":
        return row.share_of_ideal
    return format_share(row.share_of_ideal) + _COMPUTED_MARK
