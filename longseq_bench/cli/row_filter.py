"""Conditions on rows: `status!=ok`, `tokens>=4k`, `option.chunk=64`.

FIELD OPERATOR VALUE; operators are = != < <= > >= and ~ (text contains). The kind of the field
decides the units that a value may have: tokens, bytes, seconds, shares. `none` is a missing value:
it is unequal to any other and has no order.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from longseq_bench.analysis.fields import Field, fields_of
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.api.trial_text import format_option
from longseq_bench.core.errors import UnitError, UnknownNameError, UserError
from longseq_bench.core.model import canonical_dtype
from longseq_bench.core.units import parse_bytes, parse_seconds, parse_tokens
from longseq_bench.reports.document import format_cell

OPTION = "option."
ALIASES = {
    "time": "time_s",
    "peak": "peak_bytes",
    "ranks": "world_size",
    "impl": "implementation",
    "error": "max_error",
    "rate": "effective_flops",
    "sent": "bytes_sent",
    "exposed": "exposed_share",
    "density": "token_density",
    "budget": "memory_budget",
    "longest": "max_tokens",
    "floor": "fraction_of_floor",
}
"""Short names; a dash is read as an underscore."""

FIELDS: dict[str, Field] = {
    field.name: field
    for row_type in (SweepRow, SearchRow)
    for field in fields_of(row_type).values()
    if field.in_frame and field.merge != "each rank" and field.kind not in ("list", "options")
}
"""Fields by which rows can be filtered and sorted: all except lists."""

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
_CONDITION = re.compile(r"\s*([^=!<>~\s]+)\s*(!=|<=|>=|==|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_NUMBER = re.compile(r"([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(.*)")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_UNITS: dict[str, tuple[dict[str, float], str]] = {
    "flop_rate": (
        _PREFIXES | {f"{prefix}flop/s": size for prefix, size in _PREFIXES.items()},
        "write 20G or 20GFLOP/s",
    ),
    "byte_rate": (
        _PREFIXES | {f"{prefix}b/s": size for prefix, size in _PREFIXES.items()},
        "write 20G or 20GB/s",
    ),
    "share": ({"": 1.0, "%": 0.01}, "write 0.5 or 50%"),
    "count": (_PREFIXES, "write 8 or 20M"),
    "ratio": ({"": 1.0, "x": 1.0, "×": 1.0}, "write 2 or 2x"),
    "error": ({"": 1.0}, "write 1e-6"),
}
"""Units of plain numbers by kind, and an example for the error message."""
_PARSERS = {"tokens": parse_tokens, "bytes": parse_bytes, "seconds": parse_seconds}
_FLAGS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True)
class Condition:
    """One condition: a field, the test of its value in a row, and True for the operator !=."""

    field: str
    test: Callable[[Any], bool]
    is_unequal: bool = False

    def holds(self, *rows: Row) -> bool:
        """Return True if the row satisfies the condition.  rows: the row, once per label."""
        found = (self.test(value_of(row, self.field)) for row in rows)
        return all(found) if self.is_unequal else any(found)


def find_field(name: str, place: str, rows: Sequence[Row]) -> str:
    """Return the field with a name or short name; `option.NAME` is an option of the rows.

    Raises UnknownNameError with the nearest name.
    """
    if name.startswith(OPTION):
        known = {option for row in rows for option in row.options}
        if (option := name.removeprefix(OPTION)) not in known:
            raise UnknownNameError("option", option, known, place)
        return name
    key = name.strip().lower().replace("-", "_")
    field = ALIASES.get(key, key)
    if field not in FIELDS:
        raise UnknownNameError("field", name, [*ALIASES, *FIELDS], place)
    return field


def value_of(row: Row, field: str) -> Any:
    """Return a row's value; None if it has none, or if it is not a number."""
    if field.startswith(OPTION):
        value: Any = row.options.get(field.removeprefix(OPTION))
    else:
        value = getattr(row, field, None)
    return None if isinstance(value, float) and math.isnan(value) else value


def format_value(row: Row, field: str) -> str:
    """Format a row's value by the kind of its field."""
    value = value_of(row, field)
    kind = FIELDS[field].kind if field in FIELDS else "text"
    if kind == "flag" and value is not None:
        return "yes" if value else "no"
    return (
        format_option(value) if kind == "text" and value is not None else format_cell(value, kind)
    )


def parse_condition(text: str, rows: Sequence[Row]) -> Condition:
    """Parse an expression; rows: those of the results, for the options that may be named.

    Raises UserError for a malformed expression or value, UnknownNameError for an unknown field,
    option or word.
    """
    match = _CONDITION.fullmatch(text)
    where = f"--where {text!r}"
    if match is None:
        raise UserError(f"{where} can't be read; write FIELD=VALUE, tokens>=4k, label~ring")
    name, sign, raw = match[1], match[2].replace("==", "="), match[3]
    field = find_field(name, "--where", rows)
    kind = "option" if field.startswith(OPTION) else FIELDS[field].kind
    if sign == "~":
        if kind not in ("text", "option"):
            raise UserError(f"{where}: ~ works on text only, and {field} is not text")
        part = raw.casefold()
        return Condition(field, lambda value: part in _text(value).casefold())
    if kind == "option":
        return Condition(field, _option_test(sign, raw, where))
    if sign not in ("=", "!="):
        if kind in ("text", "flag"):
            raise UserError(f"{where}: {field} has no order; compare it with = or !=")
        if raw.lower() == "none":
            raise UserError(f"{where}: a missing value has no order; compare it with = or !=")
    if raw.lower() == "none":
        return Condition(field, lambda value: (value is None) == (sign == "="))
    test = _comparison(sign, _parse_value(FIELDS[field], raw, where))
    return Condition(field, test, sign == "!=")


def _comparison(sign: str, operand: Any) -> Callable[[Any], bool]:
    """Return the test of a value; a value of another type, or none, is unequal and has no order."""
    compare, types = _COMPARE[sign], str if isinstance(operand, str) else int | float

    def test(value: Any) -> bool:
        if not isinstance(value, types):
            return sign == "!="
        # equal except for rounding: 10 % is 0.1 or 1 - 0.9
        equal = isinstance(value, float) and math.isclose(value, operand, rel_tol=1e-9)
        return compare(operand if equal else value, operand)

    return test


def _parse_value(field: Field, raw: str, where: str) -> Any:
    """Parse a value in the unit of its field. Raises UserError that says how to write it."""
    if field.kind == "text":
        raw = canonical_dtype(raw) if field.name == "dtype" else raw
        if field.choices and raw not in field.choices:
            raise UnknownNameError(field.name, raw, field.choices, where)
        return raw
    if field.kind == "flag":
        if raw.lower() not in _FLAGS:
            raise UserError(f"{where}: {raw!r} is neither yes nor no")
        return _FLAGS[raw.lower()]
    if field.kind in _PARSERS:
        try:
            return _PARSERS[field.kind](raw)
        except UnitError as error:
            raise UserError(f"{where}: {error}") from None
    units, hint = _UNITS[field.kind]
    match = _NUMBER.fullmatch(raw)
    if match is None or match[2].lower() not in units:
        raise UserError(f"{where}: {raw!r} is not a number; {hint}")
    return float(match[1]) * units[match[2].lower()]


def _option_test(sign: str, raw: str, where: str) -> Callable[[Any], bool]:
    """Return the test of an option: numbers are compared as numbers, other values as text."""
    for parse in (float, parse_tokens):
        with suppress(ValueError):
            return _comparison(sign, parse(raw))
    if sign not in ("=", "!="):
        raise UserError(f"{where}: {raw!r} is not a number; write 64 or 1k")

    def test(value: Any) -> bool:
        is_equal = format_option(value) == (raw if isinstance(value, str) else raw.lower())
        return is_equal == (sign == "=")

    return test


def _text(value: Any) -> str:
    return "" if value is None else format_option(value)


def sort_rows(rows: Iterable[R], keys: Sequence[tuple[str, bool]]) -> list[R]:
    """Sort rows by (field, descending), the first key first; equal rows keep their order.

    Missing values come last in either direction, numbers before text.
    """
    table = list(rows)
    for field, descending in reversed(keys):
        table.sort(key=lambda row: _rank(value_of(row, field), descending), reverse=descending)
    return table


def _rank(value: Any, descending: bool) -> tuple[bool, bool, float, str]:
    last = (value is None) != descending
    if isinstance(value, int | float):
        return last, False, float(value), ""
    return last, True, 0.0, _text(value)


def parse_sort(text: str, rows: Sequence[Row]) -> tuple[str, bool]:
    """Parse `time` or `-time` (descending) as (field, descending).

    Raises UnknownNameError for an unknown field or option.
    """
    return find_field(text.removeprefix("-"), "--sort", rows), text.startswith("-")
