"""Transfers between ranks arrive, and the sender counts their bytes."""

import pytest
import torch

from longseq_bench.distributed.group import Group, Pending
from tests.distributed.jobs import collectives, muted, parts, shared_parts
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


def test_communication_can_be_switched_off(ranks: Ranks) -> None:
    assert ranks(3, muted) == [[0, 0, 0, 0, 0, 1, 1]] * 3


@pytest.mark.parametrize("split", [[[0, 2], [1, 3]], [[2], [0, 1, 3]]])
def test_transfers_inside_a_subgroup_are_counted(ranks: Ranks, split: list[list[int]]) -> None:
    for rank, found in enumerate(ranks(4, parts, split)):
        part = next(part for part in split if rank in part)
        index, size = part.index(rank), len(part)
        assert (found["rank"], found["size"], found["ranks"]) == (index, size, tuple(part))
        if size > 1:
            assert found["received"] == [float(part[index - 1])] * 2
        assert found["gathered"] == [float(r) for r in part]
        assert found["sent"] == (8 + 4 * (size - 1) if size > 1 else 0)


def test_two_attentions_share_the_process_groups_of_equal_parts(ranks: Ranks) -> None:
    """With NCCL each takes hundreds of MB, and a trial builds its attention several times."""
    for found in ranks(4, shared_parts):
        # none for single ranks, nor for all ranks, which have one already
        assert found["made"] == [[0, 1], [2, 3], [0, 2], [1, 3]]
        assert found["shared"] == found["connected"] == [True, True]
        assert found["kinds"] == 2


def test_a_group_not_yet_connected_has_parts() -> None:
    group = Group(3, 4)
    part = group.subgroup([[0, 2], [1, 3]])
    assert (part.rank, part.size, part.ranks, part.data) == (1, 2, (1, 3), None)
    assert part.traffic is group.traffic


def test_transfers_of_one_rank_copy() -> None:
    group = Group.alone()
    found = collectives(group)
    assert found["all_gather"] == ([[0.0] * 3], 0)
    assert found["reduce_scatter"] == ([[0.0, 1.0]], 0)
    assert found["all_to_all"] == ([[0.0]], 0)
    assert found["largest"] == [0, 0]
    assert found["total"] == [1, 0]


def test_handles_are_dropped_after_the_wait() -> None:
    """A handle keeps buffers alive."""

    class Work:
        waited = 0

        def wait(self) -> None:
            Work.waited += 1

    pending = Pending([Work(), Work()])
    pending.wait()
    pending.wait()
    assert Work.waited == 2


def test_other_transports_can_count_their_bytes() -> None:
    group = Group.alone()
    group.count(torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16))
    assert group.traffic.bytes_sent == 16
