"""Transfers between ranks arrive, and the sender counts their bytes."""

import pytest

from tests.distributed.jobs import collectives, shared_parts
from tests.ranks import Ranks

WORLDS = (2, 3, 4)


@pytest.mark.parametrize("world", WORLDS)
def test_everything_arrives_and_its_bytes_are_counted(ranks: Ranks, world: int) -> None:
    others = world - 1
    for rank, found in enumerate(ranks(world, collectives)):
        before = float((rank - 1) % world)
        assert found["exchange"] == ([[before] * 4, [10 * before] * 2], 6 * 4)
        assert found["all_gather"] == (
            [[float(r) for r in range(world) for _ in range(3)]],
            others * 12,
        )
        all_ranks = sum(range(world))
        sums = [world * (2.0 * rank + i) + all_ranks for i in range(2)]
        assert found["reduce_scatter"] == ([sums], others * 8)
        assert found["all_to_all"] == ([[10.0 * r + rank for r in range(world)]], others * 4)
        rows = [float(r) for r in range(world) for _ in range(2 * (r + 1))]
        assert found["uneven"] == ([rows], others * (rank + 1) * 2 * 4)
        # control values are not counted
        assert (found["largest"], found["uncounted"]) == ([world - 1, 0], 0)
        assert found["total"] == [world, sum(range(world))]


def test_two_attentions_share_the_process_groups_of_equal_parts(ranks: Ranks) -> None:
    """With NCCL each takes hundreds of MB, and a trial builds its attention several times."""
    for found in ranks(4, shared_parts):
        # none for single ranks, nor for all ranks, which have one already
        assert found["made"] == [[0, 1], [2, 3], [0, 2], [1, 3]]
        assert found["shared"] == found["connected"] == [True, True]
        assert found["kinds"] == 2
