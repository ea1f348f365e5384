"""Tables as lists of columns: a column is the name of a declared field, or a ValueColumn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, cast

from longseq_bench.analysis.row import fields_of
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.files import load_table
from longseq_bench.reports.document import Cell, Column, Spread, Table, ValueKind
from longseq_bench.reports.groups import has_several_ranks, name_status, split_names

SWEEP_FIELDS = split_names(
    "tokens world_size time_s peak_bytes unstable check_limits tokens_per_s share_of_bandwidth "
    "speed speedup exposed_share token_density share_of_ideal dense_source efficiency "
    "effective_flops share_of_peak bytes_sent imbalance work_imbalance tokens_per_rank max_error"
)
"""Columns of a terminal, the most important first; a narrow one leaves out the last ones."""
SEARCH_FIELDS = split_names(
    "max_tokens world_size pass_time_s peak_bytes first_failure limited_by check_limits "
    "fits_tokens fraction_of_floor tokens_per_rank imbalance runs"
)
_RANK_FIELDS = split_names(
    "world_size speedup efficiency tokens_per_rank imbalance work_imbalance bytes_sent "
    "exposed_share compute_time_s communication_time_s"
)
"""Fields whose columns are shown only where rows ran on several ranks."""
_KEPT = split_names("peak_bytes time_s pass_time_s tokens max_tokens")
"""Fields that a narrow terminal leaves out last, in this order."""
_SHOWN = {"label": "name"}
"""Attributes that are shown in place of a field."""
_OBVIOUS = split_names(
    "label implementation tokens world_size dtype mode status time_s peak_bytes max_tokens "
    "pass_time_s limited_by unstable"
)
"""Fields whose headings need no explanation."""
_GLOSSARY: dict[str, str] = load_table("glossary.yaml")
"""What the values of a column are, by headings that are no declared fields."""


def make_columns(text: str) -> tuple[Column, ...]:
    """Return columns by headings, with kinds other than text: "Name, Tokens: tokens"."""
    pairs = (one.partition(": ") for one in text.split(", "))
    return tuple(
        Column(name, cast(ValueKind, kind or "text"), help=_GLOSSARY.get(name, ""))
        for name, _, kind in pairs
    )


@dataclass(frozen=True)
class ValueColumn:
    """A column, and the function that takes its value from an item.

    priority: as in Column.  of_ranks: only where rows ran on several ranks.
    help: as in Column; that of data/glossary.yaml if it is empty.
    """

    heading: str
    kind: ValueKind
    value: Callable[[Any], Cell]
    priority: int | None = None
    of_ranks: bool = False
    help: str = ""


Columns = Sequence[str | ValueColumn]
"""Columns of a table; a name is a field that the rows declare."""


def with_interval(
    value: float | None, low: float | None, high: float | None
) -> Spread | float | None:
    """Return a value with its interval; the value alone where a bound is unknown."""
    return value if value is None or low is None or high is None else Spread(value, low, high)


def time_with_interval(row: Any) -> Spread | float | None:
    """Return the median time of a row (s), with its interval where there are several samples."""
    bounds = (row.time_low_s, row.time_high_s) if row.samples > 1 else (None, None)
    return with_interval(row.time_s, *bounds)


def speedup_with_interval(row: SweepRow) -> Spread | float | None:
    """Return the speed-up of several ranks over one, with its interval; None for one rank."""
    speedup = None if row.world_size == 1 else row.speedup
    return with_interval(speedup, row.speedup_low, row.speedup_high)


@cache
def field_column(row_type: type, name: str) -> ValueColumn:
    """Return the column of a field that a row class declares."""
    declared, of_ranks = fields_of(row_type)[name], name in _RANK_FIELDS
    value = time_with_interval if name == "time_s" else attrgetter(_SHOWN.get(name, name))
    words = "" if name in _OBVIOUS else declared.help
    priority = 1 + _KEPT.index(name) if name in _KEPT else None
    return ValueColumn(declared.heading, declared.kind, value, priority, of_ranks, words)


def build_table(
    title: str, columns: Columns, items: Sequence[Any], keep_empty: bool = False
) -> Table:
    """Return a table with a row per item; columns without any value are left out, or kept."""
    kept, cells = [], []
    row_type: type = type(items[0]) if items else object
    for named in columns:
        column = field_column(row_type, named) if isinstance(named, str) else named
        if column.of_ranks and not has_several_ranks(items):
            continue
        values = list(map(column.value, items))
        if keep_empty or any(value is not None for value in values):
            explained = column.help or _GLOSSARY.get(column.heading, "")
            kept.append(Column(column.heading, column.kind, column.priority, explained))
            cells.append(values)
    return Table(title, tuple(kept), tuple(zip(*cells, strict=True)))


def terminal_columns(
    row_type: type, names: Sequence[str], others: Mapping[str, ValueColumn] | None = None
) -> list[str | ValueColumn]:
    """Return the label and columns for a terminal, the most important first.

    names: fields of the row class.  others: columns by name that are not fields.
    """
    found: list[str | ValueColumn] = ["label"]
    for i, name in enumerate(names):
        column = (others or {}).get(name)
        if column is None:
            column = field_column(row_type, name)
            column = replace(column, value=_TERMINAL_VALUES.get(name, column.value))
        found.append(replace(column, priority=len(names) - i))
    return found


def time_or_status(row: Any) -> Cell:
    """Return the median time with its interval (s), or the status of a failed trial."""
    failed = isinstance(row, SweepRow) and row.status != "ok"
    return name_status(row.status) if failed else time_with_interval(row)


_TERMINAL_VALUES: Mapping[str, Callable[[Any], Cell]] = {
    "time_s": time_or_status,
    "unstable": lambda row: "unstable" if row.unstable else None,
    "check_limits": lambda row: "in part" if row.check_limits else None,
    # a pass over a whole sequence is compared by its time
    "tokens_per_s": lambda row: row.tokens_per_s if row.mode == "decode" else None,
}
