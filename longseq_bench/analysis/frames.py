"""Rows as pandas data frames, and as the JSON documents of the command line.

Only `to_frame` imports pandas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from longseq_bench.analysis.row import Row, fields_of
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
"""Schema version of the documents that --json prints; records have their own."""


def rows_json(table: Iterable[Row], name: Literal["rows", "results"]) -> dict[str, Any]:
    """Return the document {"schema", "rows"} of sweeps, or {"schema", "results"} of searches.

    NaN and infinity are null.
    """
    names = _columns(SweepRow if name == "rows" else SearchRow)
    values = attrgetter(*names)
    rows = [dict(zip(names, map(finite, values(row)), strict=True)) for row in table]
    return {"schema": SCHEMA, name: rows}


def _columns(row_type: type) -> list[str]:
    return [field.name for field in fields_of(row_type).values() if field.in_frame]


def finite(value: Any) -> Any:
    """Return data with null for NaN and infinity, which JSON does not have."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_frame(table: Sequence[Row], row_type: type) -> pandas.DataFrame:
    """Return rows of a class as a DataFrame; values that were not measured are NaN."""
    import pandas

    names = _columns(row_type)
    return pandas.DataFrame(map(attrgetter(*names), table), columns=names)
