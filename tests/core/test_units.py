"""Quantities, parsed and formatted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from longseq_bench.core.errors import TooLargeError, UnitError
from longseq_bench.core.units import (
    format_rate,
    format_seconds,
    format_share,
    format_tokens,
    parse_bytes,
    parse_memory_budget,
    parse_seconds,
    parse_tokens,
)

format_flops = partial(format_rate, unit="FLOP/s")


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_tokens, "4096", 4096), (parse_tokens, "4k", 4096), (parse_tokens, " 4 K ", 4096),
        (parse_tokens, "1.5M", 3 * 2**19), (parse_tokens, "1e3", 1000), (parse_tokens, 7, 7),
        (parse_bytes, "1024", 1024), (parse_bytes, "512MiB", 2**29), (parse_bytes, "1 kb", 1000),
        (parse_bytes, "7.9GiB", 8482560410), (parse_bytes, "8GB", 8 * 10**9),
        (parse_seconds, 60, 60.0), (parse_seconds, "60s", 60.0), (parse_seconds, "500ms", 0.5),
        (parse_seconds, "2min", 120.0), (parse_seconds, "1h", 3600.0),
    ],
)  # fmt: skip
def test_parsing(parse: Callable[[Any], float], text: Any, value: float) -> None:
    assert parse(text) == value
    assert type(parse(text)) is type(value)


@pytest.mark.parametrize("parse", [parse_tokens, parse_bytes, parse_seconds])
@pytest.mark.parametrize("text", ["", "12q", "-3", "1.2.3", "0", "1k2", True, "nan", -1])
def test_an_invalid_quantity_is_an_error(parse: Callable[[Any], float], text: Any) -> None:
    with pytest.raises(UnitError) as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert "; write " in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text", "maximum"),
    [
        (parse_tokens, 2**40 + 1, "1,099,511,627,776"), (parse_tokens, "1025G", "1,099,511"),
        (parse_bytes, 2**60 + 2**40, "1,048,576 TiB"), (parse_seconds, "8761h", "8,760 h"),
    ],
)  # fmt: skip
def test_the_maximum_is_named(parse: Callable[[Any], float], text: Any, maximum: str) -> None:
    with pytest.raises(TooLargeError, match=f"is too large; the maximum is {maximum}"):
        parse(text)
    assert parse_tokens(2**40) == 2**40


def test_a_memory_budget_without_its_unit_is_refused() -> None:
    for text, size in ((32, 32), ("32", 32), ("1023", 1023), ("0.9KiB", 922)):
        with pytest.raises(UnitError, match=f"{text}'? is {size} B, below 1 KiB; write 512MiB or"):
            parse_memory_budget(text)
    assert parse_memory_budget(1024) == 1024


@pytest.mark.parametrize(
    ("format_", "value", "text"),
    [
        # tokens are shortened only where exact
        (format_tokens, 1, "1"), (format_tokens, 1000, "1,000"), (format_tokens, 1024, "1k"),
        (format_tokens, 1536, "1,536"), (format_tokens, 2**20, "1M"),
        (format_seconds, 0, "0 s"), (format_seconds, 2.5e-9, "2.5 ns"),
        (format_seconds, 1.234e-5, "12.3 µs"), (format_seconds, 0.0715, "71.5 ms"),
        (format_seconds, 8.1, "8.1 s"), (format_seconds, 150, "2 min 30 s"),
        (format_seconds, 3599.9, "1 h 00 min"), (format_seconds, 7325, "2 h 02 min"),
        (format_flops, 253e9, "253 GFLOP/s"), (format_flops, 1.5e3, "1.5 kFLOP/s"),
        (format_flops, 0.5, "0.5 FLOP/s"),
        (format_share, 0, "0.0 %"), (format_share, 1, "100.0 %"), (format_share, 0.5, "50.0 %"),
        # never rounded to a false 0 or 100 %
        (format_share, 0.99999, "99.999 %"), (format_share, 1e-5, "0.001 %"),
    ],
)  # fmt: skip
def test_formatting(format_: Callable[[Any], str], value: float, text: str) -> None:
    assert format_(value) == text
