"""Every rank gets every block of the other ranks once, and gradients return to the owner."""

from importlib.util import find_spec

import pytest

from longseq_bench.distributed.kv_exchange import KVBlocks
from tests.distributed.jobs import Plan, Result, expected_totals, run_exchange
from tests.ranks import Ranks

WORLDS = (2, 3, 4)
COUNTS = {2: (7, 4), 3: (5, 3, 6), 4: (2, 5, 3, 5)}
KINDS = [
    "ring",
    "gather",
    pytest.param(
        "deepspeed", marks=pytest.mark.skipif(not find_spec("deepspeed"), reason="missing")
    ),
]
kinds = pytest.mark.parametrize("kind", KINDS)
worlds = pytest.mark.parametrize("world", WORLDS)
back = pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])


def assert_complete(plan: Plan, rank: int, result: Result) -> None:
    """Check that each block comes once with its owner's values, and own work is complete."""
    size = len(plan.counts)
    hops = size - 1 if plan.hops is None else plan.hops
    owners = [(rank - hop) % size for hop in range(1, hops + 1)]
    tokens = [
        (owner, t) for owner, start, stop in result.recorder.blocks for t in range(start, stop)
    ]
    assert sorted(tokens) == sorted(
        (owner, t) for owner in owners for t in range(plan.counts[owner])
    )
    assert result.recorder.wrong == []
    assert result.clashes == []
    shares = result.recorder.shares[0][1]
    assert result.recorder.shares == [(share, shares) for share in range(shares)]
    assert result.sent == result.formula


@kinds
@worlds
@back
@pytest.mark.parametrize("tokens", [2, 100])
def test_every_block_of_every_other_rank_comes_once(
    ranks: Ranks, kind: str, world: int, back: bool, tokens: int
) -> None:
    """Uneven shards, many blocks and one. Gradients return exactly, bytes equal the formula, and
    no buffer is used twice at a time (fault 5)."""
    plan = Plan(kind, COUNTS[world], tokens)
    for rank, result in enumerate(ranks(world, run_exchange, plan, back)):
        assert_complete(plan, rank, result)
        if back:
            others = [r for r in range(world) if r != rank]
            assert result.totals == expected_totals(plan, rank, others)


@pytest.mark.parametrize(("world", "hops"), [(2, 0), (3, 1), (4, 2)])
@back
def test_a_ring_stops_after_its_hops(ranks: Ranks, world: int, back: bool, hops: int) -> None:
    plan = Plan("ring", COUNTS[world], 2, hops=hops)
    for rank, result in enumerate(ranks(world, run_exchange, plan, back)):
        assert_complete(plan, rank, result)
        if back:
            visited = [(rank + hop) % world for hop in range(1, hops + 1)]
            assert result.totals == expected_totals(plan, rank, visited)
        if not hops:
            assert result.sent == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gather"])
@back
def test_compressed_keys_are_rounded_once(ranks: Ranks, kind: str, back: bool) -> None:
    """However many hops there are. Gradients are not compressed, and the bytes of keys are half."""
    for wire in ("bfloat16", "float16"):
        plan = Plan(kind, COUNTS[3], 2, wire=wire, rough=True)
        for rank, result in enumerate(ranks(3, run_exchange, plan, back)):
            assert_complete(plan, rank, result)


@kinds
@back
def test_without_communication_all_blocks_are_visited(ranks: Ranks, kind: str, back: bool) -> None:
    """Otherwise computation alone would be timed with less work."""
    plan = Plan(kind, COUNTS[3], 2)
    full = ranks(3, run_exchange, plan, back)
    for one, other in zip(ranks(3, run_exchange, plan, back, False), full, strict=True):
        assert one.sent == 0
        assert other.sent > 0
        for name in ("blocks", "shares", "calls"):
            assert getattr(one.recorder, name) == getattr(other.recorder, name)


@pytest.mark.parametrize("world", [2, 4])
@back
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_transfers_run_while_something_is_computed(
    ranks: Ranks, kind: str, world: int, back: bool
) -> None:
    """Transfers have to start before the computation that hides them. The last steps of a ring have
    none in forward; in backward there are gradients of the step before. A gather returns the
    gradients of a block before it gathers the next."""
    plan = Plan(kind, COUNTS[world], 2)
    for result in ranks(world, run_exchange, plan, back):
        assert result.recorder.calls[0] == "own"
        blocks = result.recorder.calls.count("block")
        idle = {
            ("ring", False): ["block", "own"],
            ("ring", True): [],
            ("gather", False): ["block"] * (world - 1),
            ("gather", True): ["block"] * blocks,
        }[kind, back]
        assert result.recorder.idle == idle
        if not (kind == "gather" and back):
            assert result.recorder.calls[len(result.recorder.calls) - len(idle) :] == idle


@pytest.mark.parametrize("tokens", [1, 3, 4, 100])
def test_blocks_are_within_the_limit_and_not_empty(tokens: int) -> None:
    for counts in ((7, 9, 8), (1, 9), (5,), (40, 39)):
        blocks = KVBlocks(counts, tokens)
        for owner, count in enumerate(counts):
            own = [blocks.block(owner, index) for index in range(blocks.per_rank)]
            # not in order, but every token is in one block
            covered = [t for block in own for t in range(block.start, block.stop)]
            assert sorted(covered) == list(range(count))
            assert all(1 <= len(block) <= blocks.longest for block in own)
        # the shortest shard has a token for every block
        assert blocks.longest <= max(tokens, -(-max(counts) // min(counts)))
