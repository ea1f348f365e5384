"""Tables of rows, made from a list of field names; the rows declare the headings and kinds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from longseq_bench.analysis.fields import Kind, fields_of
from longseq_bench.analysis.row import Row, require
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Spread, Table
from longseq_bench.reports.groups import has_several_ranks


@dataclass(frozen=True)
class TableField:
    """A column of a table of rows, where it differs from the declaration of its field.

    value: computes the cell from a row; by default it is the value of the field.
    hide_empty: left out if no row has a value.  only_ranks: also if all rows ran on one rank.
    """

    name: str
    heading: str = ""
    kind: Kind | None = None
    value: Callable[[Any], Cell] | None = None
    hide_empty: bool = False
    only_ranks: bool = False


def optional(name: str) -> TableField:
    """Declare a column that is left out where no row has a value."""
    return TableField(name, hide_empty=True)


def only_ranks(name: str) -> TableField:
    """Declare a column that is shown where rows ran on several ranks."""
    return TableField(name, hide_empty=True, only_ranks=True)


def computed(heading: str, kind: Kind, value: Callable[[Any], Cell]) -> TableField:
    """Declare a column whose cells are computed from rows."""
    return TableField("", heading, kind, value)


LEAST_PEAK = TableField("", "Least peak", "bytes", attrgetter("least_peak_bytes"), True, True)


def rows_table(
    group: Sequence[Row], source: Source, fields: Sequence[str | TableField], prefix: str = ""
) -> Table:
    """Make a table of the rows of one workload. Its title is the prefix and the workload."""
    has_ranks = has_several_ranks(group)
    columns, cells = [], []
    for field in fields:
        shown = TableField(field) if isinstance(field, str) else field
        if shown.only_ranks and not has_ranks:
            continue
        values = list(map(shown.value or _value_of(shown.name), group))
        if not shown.hide_empty or any(value is not None for value in values):
            columns.append(_column(shown, type(group[0])))
            cells.append(values)
    title = source.title(group[0], prefix)
    return Table(title, tuple(columns), tuple(zip(*cells, strict=True)))


def time_with_interval(row: SweepRow) -> Spread | float | None:
    """Return the median time of a row (s), with its interval where there are several samples."""
    if row.time_s is None or row.samples < 2:
        return row.time_s
    return Spread(row.time_s, require(row.time_low_s), require(row.time_high_s))


def _value_of(name: str) -> Callable[[Any], Cell]:
    if name != "time_s":
        return attrgetter(name)
    return lambda row: time_with_interval(row) if isinstance(row, SweepRow) else row.time_s


def _column(shown: TableField, row_type: type) -> Column:
    if not shown.name:
        return Column(shown.heading, shown.kind or "text")
    declared = fields_of(row_type)[shown.name]
    return Column(shown.heading or declared.heading, shown.kind or declared.kind)
