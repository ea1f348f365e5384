"""Lines that are absurd: read or refused with little work."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from longseq_bench.core.bounds import MAX_RANKS
from longseq_bench.core.interning import RecordInterner
from longseq_bench.core.model import Measurement, Record
from longseq_bench.core.record_line import _MOST_BYTES, BrokenLineError, read_line, write_line
from tests import make


class NoReader(RecordInterner):
    """A reader that must not be asked."""

    def read(self, line: bytes) -> Record:
        raise AssertionError(f"a line of {len(line):,} bytes was parsed")


@pytest.mark.parametrize(
    ("part", "count"), [("[],", 2**20), ("{},", 2**20), ('"":1,', 2**22), ("1,", 2**23)]
)
def test_a_line_of_more_parts_than_a_record_has_is_not_parsed(part: str, count: int) -> None:
    """A parser takes a hundred times the memory of such a line."""
    line = '{"schema":3,"command":' + part * (count + 1) + "}"
    with pytest.raises(BrokenLineError, match=r"it has [\d,]+ times the character"):
        read_line(line.encode(), NoReader())


def test_a_record_of_a_million_passes_is_read() -> None:
    passes = [0.125] * 10**6
    many = make.record(came_to=make.outcome(time=passes, cpu_time=passes))
    assert read_line(write_line(many), RecordInterner()) == many


def test_a_record_of_the_most_ranks_is_not_too_large() -> None:
    """Counted for 64 ranks with ten measurements each."""
    measured = tuple(
        Measurement(name=f"m{i}", unit="s", samples=(0.125, 0.25, 0.5), rank=rank)
        for rank in range(64)
        for i in range(10)
    )
    record = make.record(came_to=make.outcome().model_copy(update={"measurements": measured}))
    line = write_line(record)
    for byte, most in _MOST_BYTES.items():
        assert line.count(byte) * (MAX_RANKS // 64) <= most


def forged(**outcome: Any) -> bytes:
    record = json.loads(make.record().model_dump_json(by_alias=True))
    record["outcome"] |= outcome
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "measurements", [[{}] * 1000, [{"name": "time", "unit": "s", "samples": ["x"] * 1000}]]
)
def test_of_a_thousand_mistakes_in_measurements_few_are_listed(measurements: list[Any]) -> None:
    """A list of a million takes minutes and gigabytes."""
    with pytest.raises(ValidationError) as raised:
        RecordInterner().read(forged(measurements=measurements))
    assert raised.value.error_count() <= 3


def test_a_mistake_that_the_slow_reader_cannot_mend_is_read_once() -> None:
    """It reads a line three times more."""
    read = list[bytes]()

    class Counting(RecordInterner):
        def read(self, line: bytes) -> Record:
            read.append(line)
            return super().read(line)

    with pytest.raises(BrokenLineError, match=r"^outcome.status: Input should be 'ok'"):
        read_line(forged(status="good"), Counting())
    assert len(read) == 1
