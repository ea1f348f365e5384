"""Quantities: their upper bounds, and parsing and formatting of tokens, bytes, seconds and rates.

A bound is far above what any machine runs, and low enough that arithmetic with it takes no time: a
larger number is a slip, not a workload.
"""

import re
from math import isqrt

from longseq_bench.core.errors import TooLargeError, UnitError, quote

MAX_TOKENS = 2**40
MAX_NEW_TOKENS = 2**20
MAX_BATCH = 2**20
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**16
MAX_RANKS = 2**16
MAX_THREADS = 2**12
MAX_REPEATS = 10**6
MAX_ROUNDS = 10**4
MAX_SEED = 2**63 - 1
MAX_BYTES = 2**60
MAX_SECONDS = 365 * 86_400
MAX_DOCUMENTS = 2**20
"""Documents of one sequence: their lengths are listed."""
MAX_DRAWN_DOCUMENTS = 2**16
"""Documents of one sequence whose lengths are drawn: they are drawn again for each reader."""


def divisors(n: int) -> list[int]:
    """Return every whole number that divides n, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


_TOKENS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_BYTES = {"b": 1, "": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "m": 60.0, "h": 3600.0}
_EXAMPLE_BYTES = "write 512MiB or 7.9GiB"
_EXAMPLE_SECONDS = "write 60s, 500ms or 2min"
_MAX_LENGTH = 64
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_tokens(text: str | int | float, name: str = "tokens") -> int:
    """Return tokens from 4096, "4096", "4k", "1.5M".

    name: the name of the value in messages. Raises UnitError if it is not a positive whole number
    of tokens, TooLargeError above MAX_TOKENS.
    """
    most = f"{MAX_TOKENS:,} (1024G)"
    value = _quantity(text, _TOKENS, name, "write 4096, 4k or 1M", MAX_TOKENS, most)
    if value < 1 or value != int(value):
        raise UnitError(
            f"{name} {quote(text)} is not a positive whole number; write 4096, 4k or 1M"
        )
    return int(value)


def parse_bytes(text: str | int | float, name: str = "bytes") -> int:
    """Return bytes from 1024, "512MiB", "7.9GiB", "8GB". Raises UnitError if not positive.

    name: the name of the value in messages.
    """
    value = _quantity(text, _BYTES, name, _EXAMPLE_BYTES, MAX_BYTES, format_bytes(MAX_BYTES))
    if value < 1:
        raise UnitError(f"{name} {text!r} is not positive; {_EXAMPLE_BYTES}")
    return round(value)


def parse_memory_budget(text: str | int | float, name: str = "memory budget") -> int:
    """Return bytes as parse_bytes. Raises UnitError below 1 KiB, too: a unit was forgotten."""
    budget = parse_bytes(text, name)
    if budget < _BYTES["kib"]:
        raise UnitError(f"{name} {quote(text)} is {budget} B, below 1 KiB; {_EXAMPLE_BYTES}")
    return budget


def parse_seconds(text: str | int | float, name: str = "time") -> float:
    """Return seconds from 60, "60s", "500ms", "2min", "1h". Raises UnitError if not positive.

    name: the name of the value in messages.
    """
    most = f"{MAX_SECONDS / 3600:,.0f} h"
    value = _quantity(text, _SECONDS, name, _EXAMPLE_SECONDS, MAX_SECONDS, most)
    if value <= 0:
        raise UnitError(f"{name} {text!r} is not positive; {_EXAMPLE_SECONDS}")
    return value


def parse_share(text: str, name: str) -> float:
    """Return a fraction between 0 and 1 from "5%", "5 %", "0.05".

    name: the name of the value in messages. Raises UnitError for anything else: "5" is ambiguous.
    """
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise UnitError(f"{name} {text!r} is not a fraction; write 5% or 0.05") from None
    if not 0 < value < 1:
        raise UnitError(f"{name} {text!r} is not between 0 and 100 %; write 5% or 0.05")
    return value


def _quantity(
    text: str | int | float,
    scale: dict[str, float] | dict[str, int],
    name: str,
    hint: str,
    maximum: float,
    most: str,
) -> float:
    written = quote(text) if isinstance(text, int) else str(text)
    # the time to match grows with the square of the length
    match = _QUANTITY.fullmatch(written) if len(written) <= _MAX_LENGTH else None
    if match is None or match[2].lower() not in scale:
        raise UnitError(f"{name} {quote(text)} can't be read; {hint}")
    value = float(match[1]) * scale[match[2].lower()]
    if value > maximum:
        raise TooLargeError(f"{name} {quote(text)} is too large; the maximum is {most}")
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
