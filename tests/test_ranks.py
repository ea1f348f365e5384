"""The fixture that runs a function on several ranks: results by rank, and no hanging."""

import os

import pytest
import torch

from longseq_bench.distributed.group import Group
from tests.ranks import Ranks, RanksFailed


def sum_over_ranks(group: Group, factor: int) -> tuple[int, int, float, int]:
    """Return rank, size, the sum over ranks, and the process id."""
    total = group.all_sum(torch.tensor([float(group.rank * factor)]))
    return group.rank, group.size, float(total), os.getpid()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_are_in_the_order_of_ranks(ranks: Ranks, world: int) -> None:
    found = ranks(world, sum_over_ranks, 3)
    assert [rank for rank, *_ in found] == list(range(world))
    assert {(size, total) for _, size, total, _ in found} == {(world, 3 * sum(range(world)))}
    assert len({process for *_, process in found}) == world
    assert ranks(world, sum_over_ranks, 3) == found


def test_a_rank_alone_has_a_process_of_its_own(ranks: Ranks) -> None:
    first, second = (ranks.alone(sum_over_ranks, 3) for _ in range(2))
    assert first[:3] == second[:3] == (0, 1, 0.0)
    assert len({first[3], second[3], ranks(1, sum_over_ranks, 3)[0][3]}) == 3
    with pytest.raises(RanksFailed, match="rank 0 will not"):
        ranks.alone(raise_on, [0], False)


def raise_on(group: Group, ranks: list[int], waits: bool) -> None:
    """Some ranks raise; the others may wait for them."""
    if group.rank in ranks:
        raise ValueError(f"rank {group.rank} will not")
    if waits:
        group.barrier()


def test_an_exception_of_a_rank_is_reported_and_peers_do_not_hang(ranks: Ranks) -> None:
    ranks(3, sum_over_ranks, 1)
    with pytest.raises(RanksFailed) as failed:
        ranks(3, raise_on, [1], True)
    first, second, third = failed.value.texts
    assert "ValueError: rank 1 will not" in (second or "")
    assert "did not answer" in (first or "")
    assert "did not answer" in (third or "")
    assert [total for *_, total, _ in ranks(3, sum_over_ranks, 1)] == [3.0] * 3


def test_ranks_that_do_not_wait_finish_normally(ranks: Ranks) -> None:
    assert [text is None for text in ranks.failures(3, raise_on, [2], False)] == [True, True, False]
    assert [total for *_, total, _ in ranks(3, sum_over_ranks, 1)] == [3.0] * 3


def exit_on_rank_1(group: Group) -> None:
    """End the process of rank 1 without a message."""
    if group.rank == 1:
        os._exit(3)
    group.barrier()


def test_a_dead_rank_is_reported(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="rank 1: it died"):
        ranks(2, exit_on_rank_1)
    assert len(ranks(2, sum_over_ranks, 1)) == 2
