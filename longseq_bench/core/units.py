"""Quantities: their upper bounds, and parsing and formatting of tokens, bytes, seconds and rates.

A bound is far above what any machine runs, and low enough that arithmetic with it takes no time: a
larger number is a slip, not a workload.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

from longseq_bench.core.errors import TooLargeError, UnitError, quote

MAX_TOKENS = 2**40
MAX_RANKS = 2**16
MAX_ROUNDS = 10**4
MAX_BYTES = 2**60
MAX_SECONDS = 365 * 86_400


def divisors(n: int) -> list[int]:
    """Return every whole number that divides n, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


_BYTES = {"b": 1, "": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True)
class _Kind:
    """A kind of quantity: factors by unit, how to write one, the maximum, also in words."""

    scale: Mapping[str, float]
    hint: str
    maximum: float
    most: str

    def parse(self, text: str | int | float, name: str) -> float:
        written = quote(text) if isinstance(text, int) else str(text)
        match = _QUANTITY.fullmatch(written)
        if match is None or match[2].lower() not in self.scale:
            raise UnitError(f"{name} {quote(text)} can't be read; {self.hint}")
        value = float(match[1]) * self.scale[match[2].lower()]
        if value > self.maximum:
            raise TooLargeError(f"{name} {quote(text)} is too large; the maximum is {self.most}")
        if value <= 0:
            raise UnitError(f"{name} {text!r} is not positive; {self.hint}")
        return value


_COUNTS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_TOKENS = _Kind(_COUNTS, "write 4096, 4k or 1M", MAX_TOKENS, "1,099,511,627,776 (1024G)")
_MEMORY = _Kind(_BYTES, "write 512MiB or 7.9GiB", MAX_BYTES, "1,048,576 TiB")
_TIME = _Kind(_SECONDS, "write 60s, 500ms or 2min", MAX_SECONDS, "8,760 h")


def parse_tokens(text: str | int | float, name: str = "tokens") -> int:
    """Return tokens from 4096, "4096", "4k", "1.5M".

    name: the name of the value in messages. Raises UnitError if it is not a positive whole number
    of tokens, TooLargeError above MAX_TOKENS.
    """
    value = _TOKENS.parse(text, name)
    if value != int(value):
        raise UnitError(f"{name} {quote(text)} is not a whole number; {_TOKENS.hint}")
    return int(value)


def parse_bytes(text: str | int | float, name: str = "bytes") -> int:
    """Return bytes from 1024, "512MiB", "7.9GiB", "8GB". Raises UnitError if not positive."""
    return max(1, round(_MEMORY.parse(text, name)))


def parse_memory_budget(text: str | int | float, name: str = "memory budget") -> int:
    """Return bytes as parse_bytes. Raises UnitError below 1 KiB, too: a unit was forgotten."""
    budget = parse_bytes(text, name)
    if budget < 1024:
        raise UnitError(f"{name} {quote(text)} is {budget} B, below 1 KiB; {_MEMORY.hint}")
    return budget


def parse_seconds(text: str | int | float, name: str = "time") -> float:
    """Return seconds from 60, "60s", "500ms", "2min", "1h". Raises UnitError if not positive."""
    return _TIME.parse(text, name)


def parse_share(text: str, name: str) -> float:
    """Return a fraction from "5%", "5 %", "0.05". Raises UnitError for others: "5" is ambiguous."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise UnitError(f"{name} {text!r} is not a fraction; write 5% or 0.05") from None
    if not 0 < value < 1:
        raise UnitError(f"{name} {text!r} is not between 0 and 100 %; write 5% or 0.05")
    return value


def format_tokens(tokens: int) -> str:
    """Format tokens: 131072 -> "128k", 1000 -> "1,000"; only exact multiples are shortened."""
    for suffix, size in (("M", 1024**2), ("k", 1024)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size:,}{suffix}"
    return f"{tokens:,}"


def format_bytes(count: float) -> str:
    """Format bytes in the largest binary unit with a figure of at least 1, to 3 digits."""
    for suffix, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{_digits(count / size)} {suffix}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format seconds in the largest unit with a figure of at least 1, to 3 digits."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
    for suffix, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {suffix}"
    return f"{_digits(seconds / 1e-9)} ns" if seconds > 0 else "0 s"


def format_rate(per_second: float, unit: str) -> str:
    """Format a rate with a decimal prefix: 253e9, "FLOP/s" -> "253 GFLOP/s"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_second >= size:
            return f"{_digits(per_second / size)} {prefix}{unit}"
    return f"{_digits(per_second)} {unit}"


def format_share(share: float) -> str:
    """Format a fraction as a percentage that never rounds to a false 0 % or 100 %."""
    for places in range(1, 16):
        text = f"{share * 100:.{places}f}"
        if share in (0.0, 1.0) or float(text) not in (0.0, 100.0):
            return f"{text} %"
    return f"{share * 100:.3g} %"


def _digits(value: float) -> str:
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"
