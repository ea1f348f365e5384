"""Conditions on rows, as people write them: `status!=ok`, `tokens>=4k`, `option.chunk=64`.

FIELD OPERATOR VALUE; operators are = != < <= > >= and ~ (contains, in text). A value is read by
what its field is: tokens, bytes, seconds, shares; `none` is a value that is missing. A missing
value is unequal to any other and neither less nor greater.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from longseq_bench.analysis.fields import Kind, fields_of
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.cli.progress import option_value
from longseq_bench.core.errors import UnitError, UnknownNameError, UserError
from longseq_bench.core.model import (
    Allocator,
    Device,
    DType,
    Keep,
    Mode,
    Phase,
    Status,
    canonical_dtype,
)
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

KINDS: dict[str, Kind] = {
    field.name: field.kind
    for row_type in (SweepRow, SearchRow)
    for field in fields_of(row_type).values()
    if field.in_frame and field.merge != "each rank" and field.kind not in ("list", "options")
}
"""The kind of each field that rows can be chosen and sorted by; lists are not among them."""

_WORDS: dict[str, tuple[str, ...]] = {
    "device": get_args(Device),
    "dtype": get_args(DType),
    "mode": get_args(Mode),
    "status": get_args(Status),
    "phase": get_args(Phase),
    "failure_phase": get_args(Phase),
    "keep": get_args(Keep),
    "allocator": get_args(Allocator),
}
"""Every value that a field can have, where they are known."""

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([^=!<>~\s]+)\s*(!=|<=|>=|==|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_NUMBER = re.compile(r"([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(.*)")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_ALIKE = 1e-9


@dataclass(frozen=True)
class Condition:
    """One expression. `holds` says of a row whether it is so; `field` is the row's own name."""

    text: str
    field: str
    holds: Callable[[Row], bool]


def field_of(name: str, place: str, rows: Sequence[Row]) -> str:
    """A field of rows by its name or short name; `option.NAME` is one of their options.

    Raises UnknownNameError with the nearest name.
    """
    if name.startswith(OPTION):
        known = {option for row in rows for option in row.options}
        if (option := name.removeprefix(OPTION)) not in known:
            raise UnknownNameError("option", option, known, place)
        return name
    plain = name.strip().lower().replace("-", "_")
    field = ALIASES.get(plain, plain)
    if field not in KINDS:
        raise UnknownNameError("field", name, [*ALIASES, *KINDS], place)
    return field


def value_of(row: Row, field: str) -> Any:
    """A row's value; None where it has none, or where it is not a number."""
    if field.startswith(OPTION):
        value = row.options.get(field.removeprefix(OPTION))
    else:
        value = getattr(row, field, None)
    return None if isinstance(value, float) and math.isnan(value) else value


def words_of(row: Row, field: str) -> str:
    """A row's value as people read it, by what its field is."""
    value, kind = value_of(row, field), KINDS.get(field, "text")
    if value is None or kind in _QUANTITIES:
        return format_cell(value, kind)
    return ("yes" if value else "no") if kind == "flag" else _written(value)


def condition(text: str, rows: Sequence[Row], place: str = "--where") -> Condition:
    """An expression, read. rows: those of the results, for options that may be named.

    Raises UserError for what is no expression or a value that can't be read, UnknownNameError for
    a field, an option or a word that is not there.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UserError(
            f"{place} {text!r} can't be read; write FIELD=VALUE, tokens>=4k, label~ring"
        )
    name, sign, raw = match[1], match[2].replace("==", "="), match[3]
    field = field_of(name, place, rows)
    if field.startswith(OPTION):
        return Condition(text, field, _of_option(field, sign, raw, f"{place} {text!r}"))
    return Condition(text, field, _of_field(field, sign, raw, f"{place} {text!r}"))


def _of_field(field: str, sign: str, raw: str, where: str) -> Callable[[Row], bool]:
    kind = KINDS[field]
    if sign == "~":
        _refuse(kind != "text", f"{where}: {field} is no text; ~ looks for a part of text")
        return _contains(field, raw)
    ordering = sign in ("<", "<=", ">", ">=")
    _refuse(ordering and kind in ("text", "flag"),
            f"{where}: {field} has no order; compare it with = or !=")  # fmt: skip
    if raw.lower() == "none":
        _refuse(ordering, f"{where}: a missing value has no order; compare it with = or !=")
        return lambda row: (value_of(row, field) is None) == (sign == "=")
    wanted = read_value(field, raw, where)
    compare = _OPERATORS[sign]

    def holds(row: Row) -> bool:
        value = value_of(row, field)
        return sign == "!=" if value is None else compare(_near(value, wanted), wanted)

    return holds


def _contains(field: str, part: str) -> Callable[[Row], bool]:
    looked_for = part.casefold()

    def holds(row: Row) -> bool:
        value = value_of(row, field)
        return value is not None and looked_for in _written(value).casefold()

    return holds


def _near(value: Any, wanted: Any) -> Any:
    """The wanted value itself where both are one but for rounding: 10 % is 0.1 and 1 - 0.9."""
    floats = isinstance(value, float) and isinstance(wanted, int | float)
    return wanted if floats and math.isclose(value, wanted, rel_tol=_ALIKE) else value


def read_value(field: str, raw: str, where: str) -> Any:
    """A value as its field's rows hold it. Raises UserError saying how it may be written."""
    kind = KINDS[field]
    if kind == "text":
        raw = canonical_dtype(raw) if field == "dtype" else raw
        if field in _WORDS and raw not in _WORDS[field]:
            raise UnknownNameError(field, raw, _WORDS[field], where)
        return raw
    try:
        return _READERS[kind](raw)
    except UnitError as error:
        raise UserError(f"{where}: {error}") from None


def _number(units: Mapping[str, float], hint: str) -> Callable[[str], float]:
    def read(raw: str) -> float:
        match = _NUMBER.fullmatch(raw)
        if match is None or match[2].lower() not in units:
            raise UnitError(f"{raw!r} is no number; {hint}")
        return float(match[1]) * units[match[2].lower()]

    return read


def _yes(raw: str) -> bool:
    words = {"true": True, "yes": True, "false": False, "no": False}
    if raw.lower() not in words:
        raise UnitError(f"{raw!r} is neither yes nor no")
    return words[raw.lower()]


_QUANTITIES = frozenset(get_args(Kind)) - {"text", "flag", "list", "options"}
_RATES = _PREFIXES | {f"{prefix}flop/s": size for prefix, size in _PREFIXES.items()}
_READERS: dict[str, Callable[[str], Any]] = {
    "tokens": parse_tokens,
    "bytes": parse_bytes,
    "seconds": parse_seconds,
    "flop_rate": _number(_RATES, "write 20G or 20GFLOP/s"),
    "share": _number({"": 1.0, "%": 0.01}, "write 0.5 or 50%"),
    "count": _number(_PREFIXES, "write 8 or 20M"),
    "ratio": _number({"": 1.0, "x": 1.0, "×": 1.0}, "write 2 or 2x"),
    "error": _number({"": 1.0}, "write 1e-6"),
    "flag": _yes,
}


def _of_option(field: str, sign: str, raw: str, where: str) -> Callable[[Row], bool]:
    """Options are what their implementation takes: numbers are compared as such, all else as it
    is written."""
    if sign == "~":
        return _contains(field, raw)
    number = _option_number(raw)
    if sign in ("=", "!="):
        return lambda row: _same(value_of(row, field), raw, number) == (sign == "=")
    if number is None:
        raise UserError(f"{where}: {raw!r} is no number; write 64 or 1k")
    compare, least = _OPERATORS[sign], number

    def holds(row: Row) -> bool:
        value = value_of(row, field)
        return _is_number(value) and compare(_near(value, least), least)

    return holds


def _same(value: Any, raw: str, number: float | None) -> bool:
    if _is_number(value):
        return number is not None and math.isclose(value, number, rel_tol=_ALIKE)
    return _written(value) == raw.lower() if not isinstance(value, str) else value == raw


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _option_number(raw: str) -> float | None:
    try:
        return float(raw)
    except ValueError:
        pass
    try:
        return parse_tokens(raw)
    except UnitError:
        return None


def _written(value: Any) -> str:
    """A value as it is written after -o NAME=."""
    return option_value(value)


def _refuse(wrong: bool, sentence: str) -> None:
    if wrong:
        raise UserError(sentence)


def ordered(rows: Iterable[R], fields: Sequence[tuple[str, bool]]) -> list[R]:
    """Rows sorted by (field, descending), the first field first; missing values come last either
    way, and equal rows keep their order."""
    table = list(rows)
    for field, descending in reversed(fields):
        have = [row for row in table if value_of(row, field) is not None]
        lack = [row for row in table if value_of(row, field) is None]
        have.sort(key=lambda row: _rank(value_of(row, field)), reverse=descending)
        table = have + lack
    return table


def _rank(value: Any) -> tuple[int, float, str]:
    """A place for values of any type: numbers before words."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, _written(value)


def sorting(text: str, rows: Sequence[Row]) -> tuple[str, bool]:
    """`time` or `-time`, descending, as (field, descending).

    Raises UnknownNameError for a field, or an option, that is not there.
    """
    return field_of(text.removeprefix("-"), "--sort", rows), text.startswith("-")
