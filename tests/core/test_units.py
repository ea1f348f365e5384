"""Quantities, both ways."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.core.errors import UnitError
from longseq_bench.core.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_tokens,
    parse_bytes,
    parse_seconds,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("4k", 4096), (" 4 K ", 4096), ("1.5M", 3 * 2**19), ("1e3", 1000), (7, 7)],
)
def test_tokens_are_read(text: str | int, tokens: int) -> None:
    assert parse_tokens(text) == tokens
    assert type(parse_tokens(text)) is int


@pytest.mark.parametrize(
    ("text", "count"),
    [("1024", 1024), ("512MiB", 2**29), ("7.9GiB", 8482560410), ("8GB", 8 * 10**9), ("1 kb", 1000)],
)
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize(
    ("text", "seconds"), [(60, 60), ("60s", 60), ("500ms", 0.5), ("2min", 120), ("1h", 3600)]
)
def test_seconds_are_read(text: str | int, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("parse", [parse_tokens, parse_bytes, parse_seconds])
@pytest.mark.parametrize(
    "text", ["", "12q", "-3", "k", "1.2.3", "0", "1k2", True, "nan", "inf", -1]
)
def test_what_is_no_quantity_is_refused(parse: Callable[[Any], float], text: Any) -> None:
    with pytest.raises(UnitError) as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert "; write " in str(caught.value)


@pytest.mark.parametrize("text", ["0.5", "0.1k", "1.0001k"])
def test_tokens_are_whole(text: str) -> None:
    with pytest.raises(UnitError, match="not a positive whole number"):
        parse_tokens(text)


@pytest.mark.parametrize("parse", [parse_tokens, parse_bytes, parse_seconds])
def test_a_number_too_large_is_refused(parse: Callable[[Any], float]) -> None:
    with pytest.raises(UnitError, match="1e400"):
        parse("1e400")


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2**50))
def test_tokens_come_back_as_they_went(tokens: int) -> None:
    assert parse_tokens(format_tokens(tokens).replace(",", "")) == tokens


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2**50))
def test_bytes_come_back_to_three_digits(count: int) -> None:
    back = parse_bytes(format_bytes(count).replace(",", ""))
    assert abs(back - count) <= 0.006 * count


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-9, 119))
def test_seconds_come_back_to_three_digits(seconds: float) -> None:
    text = format_seconds(seconds).replace(",", "").replace("µs", "us")
    number, unit = text.split()
    back = float(number) * 1e-9 if unit == "ns" else parse_seconds(text)
    assert abs(back - seconds) <= 0.006 * seconds


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(1, "1"), (1000, "1,000"), (1024, "1k"), (1536, "1,536"), (131072, "128k"), (2**20, "1M")],
)
def test_tokens_are_shortened_only_where_exact(tokens: int, text: str) -> None:
    assert format_tokens(tokens) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (80_000, "78.1 KiB"),
        (7.9 * 2**30, "7.9 GiB"),
        (2**40, "1 TiB"),
        (-5 * 2**20, "-5 MiB"),
    ],
)
def test_bytes_never_fall_below_the_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-9, "2.5 ns"),
        (1.234e-5, "12.3 µs"),
        (0.0715, "71.5 ms"),
        (8.1, "8.1 s"),
        (150, "2 min 30 s"),
        (3599.9, "1 h 00 min"),
        (7325, "2 h 02 min"),
    ],
)
def test_seconds_are_written_by_size(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(253e9, "253 GFLOP/s"), (1.5e3, "1.5 kFLOP/s"), (0.5, "0.5 FLOP/s")]
)
def test_rates_have_decimal_prefixes(rate: float, text: str) -> None:
    assert format_rate(rate, "FLOP/s") == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0 %"), (1, "100.0 %"), (0.5, "50.0 %"), (0.99999, "99.999 %"), (1e-5, "0.001 %")],
)
def test_shares(share: float, text: str) -> None:
    assert format_share(share) == text


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-8, 1 - 1e-8))
def test_a_share_is_never_falsely_all_or_nothing(share: float) -> None:
    text = format_share(share)
    assert text.endswith(" %")
    assert 0 < float(text.removesuffix(" %")) < 100


def test_a_share_just_below_all_is_not_rounded_either() -> None:
    assert format_share(1 - 1e-12) not in {"0 %", "100 %", "0", "1", "0.0 %", "100.0 %"}
