"""Cells: the format of each kind of quantity."""

import math

import pytest

from longseq_bench.reports.document import Cell, Spread, ValueKind, format_cell


@pytest.mark.parametrize(
    ("cell", "kind", "text"),
    [
        (None, "seconds", "—"),
        (131072, "tokens", "128k"),
        (40_961, "tokens", "40,961"),
        (60.0, "bytes", "60 B"),
        (3 * 2**20, "bytes", "3 MiB"),
        (0.0123, "seconds", "12.3 ms"),
        (Spread(0.0123, 0.0121, 0.0124), "seconds", "12.3 ms ±1.6 %"),
        (Spread(2.0, 2.0, 2.0), "seconds", "2 s ±0 %"),
        (Spread(2.0, 1.9, 4.5), "seconds", "2 s ±125 %"),
        (2.53e11, "flop_rate", "253 GFLOP/s"),
        (0.9991, "share", "99.9 %"),
        (52488.4, "count", "52,488"),
        (0.2034, "ratio", "0.203×"),
        (12345.0, "ratio", "12,345×"),
        (2.06e-6, "error", "2.1e-06"),
        (math.inf, "error", "inf"),
        ("as it is", "seconds", "as it is"),
    ],
)
def test_each_kind_is_written_with_its_unit(cell: Cell, kind: ValueKind, text: str) -> None:
    assert format_cell(cell, kind) == text


def test_the_spread_is_the_larger_distance() -> None:
    assert Spread(10.0, 9.0, 10.5).share == Spread(10.0, 9.9, 11.0).share == pytest.approx(0.1)
