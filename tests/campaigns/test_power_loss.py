"""A short form of the power-loss campaign: every prefix of four scenarios, with random fates."""

from tests.campaigns.power_loss import find_failures


def test_no_saved_record_is_lost_by_a_power_loss() -> None:
    assert list(find_failures(110, seed=7)) == []
