"""A table of rows by its fields: what stands under each heading, and when it is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from longseq_bench.analysis.row import Row
from longseq_bench.reports.base import Source
from longseq_bench.reports.document import Cell, Column, Kind, Table
from longseq_bench.reports.groups import capital, spread_out, workload_words


class Field(NamedTuple):
    """A column of a table of rows, and how its value is taken from a row.

    always: shown although no row fills it.  ranks: only where a row of the table has several.
    """

    name: str
    kind: Kind
    value: Callable[[Any], Cell]
    always: bool = True
    ranks: bool = False


def plain(name: str, kind: Kind, key: str, always: bool = True) -> Field:
    """A field that is the value of a key."""
    return Field(name, kind, attrgetter(key), always)


def of_ranks(name: str, kind: Kind, key: str) -> Field:
    """A field that is shown where rows ran on several ranks."""
    return Field(name, kind, attrgetter(key), False, True)


def rows_table(group: Sequence[Row], source: Source, fields: Sequence[Field]) -> Table:
    """A table of a group of rows; columns that no row fills are left out unless always shown."""
    several = spread_out(group)
    possible = [f for f in fields if several or not f.ranks]
    shown = [f for f in possible if f.always or any(f.value(row) is not None for row in group)]
    title = workload_words(group[0], source.machines)
    rows = tuple(tuple(f.value(row) for f in shown) for row in group)
    return Table(capital(title), tuple(Column(f.name, f.kind) for f in shown), rows)
