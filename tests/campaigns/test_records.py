"""A short form of the campaign of hostile records."""

from tests.campaigns.records import find_failures


def test_hostile_records_are_broken_lines_and_no_traceback() -> None:
    assert list(find_failures(2, seed=7, formats="csv,json")) == []
