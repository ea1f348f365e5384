"""Options of implementations: values coerced from user input.

attention/signature_options.py reads the specs from a signature. They are sent to the parent as
data, so that it can check a config without importing an implementation.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from longseq_bench.core.errors import TooLargeError, UnitError, UnknownNameError, UserError, quote
from longseq_bench.core.model import Frozen, OptionValue, canonical_dtype
from longseq_bench.core.units import MAX_TOKENS, parse_tokens

_BOOLEAN = TypeAdapter(bool)

OptionKind = Literal["int", "float", "str", "bool", "ints"]


class Replaces(NamedTuple):
    """Another option, left out where this one has a value; unless: what both count with."""

    option: str
    unless: tuple[str, OptionValue] = ("", None)


class OptionSpec(Frozen):
    """One option. kind `ints`: whole numbers separated by commas. least: the minimum of an int."""

    name: str
    kind: OptionKind
    default: OptionValue = None
    optional: bool = False
    choices: tuple[str, ...] = ()
    least: int = 1
    help: str = ""
    replaces: Replaces | None = None

    def coerce(self, raw: Any, place: str = "") -> OptionValue:
        """Return the value of user input. Raises UserError with the option and the place."""
        try:
            return self._coerce(raw, place)
        except (ValueError, TypeError, UnitError) as error:
            where = f" in {place}" if place else ""
            expected = _EXPECTED[self.kind].format(least=self.least)
            if isinstance(error, TooLargeError):
                expected = f"is too large; the maximum is {MAX_TOKENS:,}"
            raise UserError(f"option {self.name}={quote(raw)}{where} {expected}") from None

    def _coerce(self, raw: Any, place: str) -> OptionValue:
        if raw is None or (self.optional and str(raw).lower() in {"none", "null", ""}):
            if not self.optional:
                raise ValueError("missing")
            return None
        if self.kind == "bool":
            return _BOOLEAN.validate_python(raw)
        if self.kind == "int":
            is_zero = self.least == 0 and str(raw) == "0" and raw is not False
            return 0 if is_zero else parse_tokens(raw)
        if self.kind == "float":
            return _finite(raw)
        if self.kind == "ints":
            parts = raw if isinstance(raw, (list, tuple)) else str(raw).split(",")
            return tuple(parse_tokens(part) for part in parts)
        text = canonical_dtype(str(raw)) if "float32" in self.choices else str(raw)
        if self.choices and text not in self.choices:
            raise UnknownNameError(self.name, text, self.choices, place)
        return text


_EXPECTED: dict[OptionKind, str] = {
    "int": "is not a whole number from {least} up (write 1024 or 1k)",
    "float": "is not a number from 0 up",
    "bool": "is neither true nor false",
    "ints": "is not whole numbers with commas (write 1024,2048 or 1k,2k)",
    "str": "is not a word",
}


def fill(
    specs: tuple[OptionSpec, ...], given: dict[str, Any], owner: str
) -> dict[str, OptionValue]:
    """Return all options of `owner`, coerced, with defaults, so that a record is complete.

    An option that another one replaces is left out. Raises UserError for an invalid value,
    UnknownNameError for an unknown option.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in given:
        if name not in by_name:
            if not by_name:
                raise UserError(f"{owner} takes no options, but {name!r} was given")
            raise unknown_option(name, by_name, owner)
    values = {
        name: spec.coerce(given[name], owner) if name in given else spec.default
        for name, spec in by_name.items()
    }
    for name, spec in by_name.items():
        other = spec.replaces
        if other and values[name] is not None and other.unless not in values.items():
            del values[other.option]
    return values


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Return ["sparsity=0.99", "segments=1024,2048"] as a dict; the values stay text.

    Raises UserError for an assignment without "=" or name, and for a name given twice.
    """
    found: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not name:
            raise UserError(f"option {assignment!r} can't be read; write {name or 'NAME'}=VALUE")
        if name in found:
            raise UserError(f"option {name} is given twice, as {found[name]!r} and {value!r}")
        found[name] = value
    return found


def unknown_option(name: str, known: Iterable[str], place: str) -> UserError:
    """Return a hint for an unknown option: the nearest name, or the option that replaced it."""
    if name == "sparsity_ratio" and "sparsity" in known:
        return UserError(
            f"there is no option {name!r} in {place}: it meant density, the fraction of the blocks "
            f"that is kept; write sparsity, the fraction that is skipped"
        )
    return UnknownNameError("option", name, known, place)


def _finite(raw: Any) -> float:
    value = math.nan if isinstance(raw, bool) else float(raw)
    if not math.isfinite(value) or value < 0:
        raise ValueError(raw)
    return value
