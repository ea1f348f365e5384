"""The helper by which tests run on several ranks: answers by rank, and nothing ever hangs."""

import os

import pytest
import torch

from longseq_bench.distributed.group import Group
from tests.ranks import Ranks, RanksFailed


def summed(group: Group, factor: int) -> tuple[int, int, float, int]:
    """Who this is, and what all give together."""
    total = group.all_sum(torch.tensor([float(group.rank * factor)]))
    return group.rank, group.size, float(total), os.getpid()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_rank_answers_in_its_place(ranks: Ranks, world: int) -> None:
    found = ranks(world, summed, 3)
    assert [rank for rank, *_ in found] == list(range(world))
    assert {(size, total) for _, size, total, _ in found} == {(world, 3 * sum(range(world)))}
    assert len({process for *_, process in found}) == world
    assert ranks(world, summed, 3) == found


def refuses(group: Group, ranks: list[int], waits: bool) -> None:
    """Some ranks raise; the others may wait for them."""
    if group.rank in ranks:
        raise ValueError(f"rank {group.rank} will not")
    if waits:
        group.barrier()


def test_a_rank_that_raises_is_named_and_its_peers_do_not_hang(ranks: Ranks) -> None:
    ranks(3, summed, 1)
    with pytest.raises(RanksFailed) as failed:
        ranks(3, refuses, [1], True)
    first, second, third = failed.value.texts
    assert "ValueError: rank 1 will not" in (second or "")
    assert "did not answer" in (first or "")
    assert "did not answer" in (third or "")
    assert [total for *_, total, _ in ranks(3, summed, 1)] == [3.0] * 3


def test_ranks_that_need_no_other_end_well(ranks: Ranks) -> None:
    assert [text is None for text in ranks.failures(3, refuses, [2], False)] == [True, True, False]
    assert [total for *_, total, _ in ranks(3, summed, 1)] == [3.0] * 3


def dies(group: Group) -> None:
    """One rank is gone without a word."""
    if group.rank == 1:
        os._exit(3)
    group.barrier()


def test_a_rank_that_dies_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="rank 1: it died"):
        ranks(2, dies)
    assert len(ranks(2, summed, 1)) == 2
