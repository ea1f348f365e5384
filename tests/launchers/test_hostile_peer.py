"""A short run of the campaign of hostile messages; the long one is started by hand."""

from tests.campaigns import hostile_peer


def test_hostile_messages_forge_nothing_and_end_nothing() -> None:
    seen = hostile_peer.run(count=4, seed=18)
    assert seen.problems == []
    assert len(seen.sent) == 8
    assert set(seen.sent.values()) == {4}
