"""Tokens are exchanged for heads and back, and no value is lost or misplaced."""

from time import process_time

import pytest

from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import GatherScatter
from tests.distributed.jobs import Swap, Swapped, swap
from tests.ranks import Ranks

COUNTS = {2: [(4, 4), (3, 5)], 3: [(4, 4, 4), (1, 6, 3)], 4: [(2, 2, 2, 2), (5, 1, 3, 2)]}
CASES = [(world, counts) for world, all_counts in COUNTS.items() for counts in all_counts]
kinds = pytest.mark.parametrize("kind", ["all", "gather"])


def assert_right(swapped: list[Swapped]) -> None:
    for rank, one in enumerate(swapped):
        assert one.to_heads, f"rank {rank} has wrong heads or tokens"
        assert one.to_tokens, f"rank {rank} got back other values than it sent"
        assert one.sent == one.formula > 0


@kinds
@pytest.mark.parametrize(("world", "counts"), CASES)
def test_to_heads_and_back_is_the_identity(
    ranks: Ranks, kind: str, world: int, counts: tuple[int, ...]
) -> None:
    """Even and uneven shards, one or more stages of heads, small and large transfers. A gather has
    all heads in one stage."""
    for each, stages, part in ((1, 1, 100), (3, 1, 2), (1, 2, 2), (2, 2, 1)):
        if kind == "gather" and stages > 1:
            continue
        plan = Swap(kind, counts, each * stages * world, each, part)
        assert_right(ranks(world, swap, plan))


@kinds
def test_without_communication_shapes_are_the_same(ranks: Ranks, kind: str) -> None:
    for one in ranks(3, swap, Swap(kind, (1, 6, 3), 6, 1), False):
        assert one.sent == 0
        assert not one.to_heads


def test_the_first_tokens_of_thousands_of_ranks_are_found_at_once() -> None:
    """A plan for 65,536 ranks took over a minute; half a second is 200 times what this takes."""
    ranks = 2**15
    start_s = process_time()
    exchange = GatherScatter(Group(0, ranks), (1, 2) * (ranks // 2))
    assert process_time() - start_s < 0.5
    assert exchange.starts[:4] == [0, 1, 3, 4]
    assert exchange.starts[-1] == 3 * ranks // 2 - 2
