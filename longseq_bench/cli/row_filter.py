"""Conditions of `longseq show --where`, and its order.

    tokens>=4k      status!=ok      time<10ms      option.chunk=64      label~zigzag

The value is read in the unit of the field, ~ means "contains", and `none` is a missing value. A
heading names a field, too: ranks, max-error.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from longseq_bench.analysis.row import Field, R, Row, fields_of
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.api.progress import format_option
from longseq_bench.core.errors import UnitError, UnknownNameError, UserError
from longseq_bench.core.model import canonical_dtype
from longseq_bench.core.units import parse_bytes, parse_seconds, parse_tokens

OPTION = "option."
FIELDS: dict[str, Field] = {
    field.name: field
    for row_type in (SearchRow, SweepRow)
    for field in fields_of(row_type).values()
    if field.in_frame and field.merge != "each rank" and field.kind not in ("list", "options")
}
"""Fields by which rows can be filtered and sorted: all except lists."""

_NAMES = {field.heading.lower().replace(" ", "_"): name for name, field in FIELDS.items()}
_NAMES |= {"impl": "implementation", "implementation": "implementation", "peak": "peak_bytes"}
_COMPARISON = re.compile(r"([A-Za-z][\w.-]*)\s*(==|!=|<=|>=|=|<|>|~)\s*([^=!<>~]+)")
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {"=": operator.eq, "==": operator.eq}
_SIGNS |= {"!=": operator.ne, "<": operator.lt, "<=": operator.le}
_SIGNS |= {">": operator.gt, ">=": operator.ge}
_PARSERS = {"tokens": parse_tokens, "bytes": parse_bytes, "seconds": parse_seconds}
_FLAGS = {"true": True, "yes": True, "false": False, "no": False}


def find_field(name: str, place: str, rows: Sequence[Row]) -> str:
    """Return the field with a name or heading; `option.NAME` is an option of the rows.

    Raises UnknownNameError with the nearest name.
    """
    if name.startswith(OPTION):
        known = {option for row in rows for option in row.options}
        if (option := name.removeprefix(OPTION)) not in known:
            raise UnknownNameError("option", option, known, place)
        return name
    key = name.strip().lower().replace("-", "_")
    field = key if key in FIELDS else _NAMES.get(key)
    if field is None:
        known = {*FIELDS, *filter(str.isidentifier, _NAMES)}
        raise UnknownNameError("field", name, known, place)
    return field


def value_of(row: Row, field: str) -> Any:
    """Return a row's value, None if it has none; an option that is no number as text."""
    if not field.startswith(OPTION):
        return getattr(row, field, None)
    value = row.options.get(field.removeprefix(OPTION))
    return value if value is None or type(value) in (int, float) else format_option(value)


def filter_rows(
    rows: Sequence[R], every: Sequence[Row], where: Sequence[str], sort: Sequence[str]
) -> list[R]:
    """Return the rows for which all conditions hold, in order; missing values are last.

    No condition holds on a field that rows of this class don't have.  every: all rows, whose
    options may be named.  Raises UserError for a condition that can't be read, UnknownNameError for
    an unknown name.
    """
    conditions = [_read(text, every) for text in where]
    keys = [(find_field(text.removeprefix("-"), "--sort", every), text[:1] == "-") for text in sort]
    kept = [row for row in rows if all(holds(row) for holds in conditions)]
    for name, is_descending in reversed(keys):
        values = [(row, value_of(row, name)) for row in kept]
        known = [(row, value) for row, value in values if value is not None]
        # an option may have numbers and words
        known.sort(key=lambda pair: (isinstance(pair[1], str), pair[1]), reverse=is_descending)
        kept = [row for row, _ in known] + [row for row, value in values if value is None]
    return kept


def _read(text: str, rows: Sequence[Row]) -> Callable[[Row], bool]:
    """Return the function that tests a row by a condition."""
    where, found = f"--where {text!r}", _COMPARISON.fullmatch(text.strip())
    if found is None:
        raise UserError(f"{where} can't be read; write FIELD=VALUE, tokens>=4k, label~ring")
    name, sign, raw = find_field(found[1], "--where", rows), found[2], found[3].strip("\"'")
    is_missing = raw.lower() == "none" and sign in ("=", "==", "!=")
    value = None if is_missing or sign == "~" else _parse(FIELDS.get(name), raw, where)

    def holds(row: Row) -> bool:
        if name in FIELDS and not hasattr(row, name):
            return False
        own = _rounded(value_of(row, name))
        if sign == "~":
            return own is not None and raw.lower() in str(own).lower()
        try:
            return bool(_SIGNS[sign](own, value))
        except TypeError:  # a missing value is neither less nor greater, nor is a word
            return False

    return holds


def _parse(field: Field | None, raw: str, where: str) -> Any:
    """Return a value in the unit of its field; of an option as a number if it is one."""
    if field is None:
        for parse in (float, parse_tokens):
            with suppress(ValueError):
                return parse(raw)
        return raw
    if field.kind == "text":
        raw = canonical_dtype(raw) if field.name == "dtype" else raw
        if field.choices and raw not in field.choices:
            raise UnknownNameError(field.name, raw, field.choices, where)
        return raw
    try:
        if field.kind == "flag":
            return _FLAGS[raw.lower()]
        if field.kind in _PARSERS:
            return _rounded(_PARSERS[field.kind](raw))
        return _rounded(float(raw.removesuffix("%")) / (100 if raw.endswith("%") else 1))
    except UnitError as error:
        raise UserError(f"{where}: {error}") from None
    except (KeyError, ValueError):
        forms = "yes or no" if field.kind == "flag" else "0.5, 50% or 1e-6"
        problem = f"{raw!r} can't be compared with {field.name}"
        raise UserError(f"{where}: {problem}; write {forms}") from None


def _rounded(value: Any) -> Any:
    """Return a number without the error of its last digits: 10 % is 0.1 or 1 - 0.9."""
    return float(f"{value:.12g}") if isinstance(value, float) else value
