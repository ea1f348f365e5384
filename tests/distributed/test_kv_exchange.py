"""Every rank sees every block of every other rank once, and gradients come home."""

import pytest

from longseq_bench.distributed import deepspeed_transport
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.kv_exchange import KVBlocks
from tests.distributed.jobs import Plan, Result, run_exchange, wanted_totals
from tests.ranks import Ranks

WORLDS = (2, 3, 4)
COUNTS = {2: (7, 4), 3: (5, 3, 6), 4: (2, 5, 3, 5)}
KINDS = [
    "ring",
    "gather",
    pytest.param(
        "deepspeed",
        marks=pytest.mark.skipif(
            bool(why := deepspeed_transport.unavailable_reason()), reason=why or "installed"
        ),
    ),
]
kinds = pytest.mark.parametrize("kind", KINDS)
worlds = pytest.mark.parametrize("world", WORLDS)
back = pytest.mark.parametrize("back", [False, True], ids=["there", "and-back"])


def expected_tokens(plan: Plan, rank: int, hops: int | None = None) -> set[tuple[int, int]]:
    """Tokens of others that a rank has to see: owner and local token."""
    size = len(plan.counts)
    far = range(1, (size - 1 if hops is None else hops) + 1)
    owners = [(rank - hop) % size for hop in far]
    return {(owner, token) for owner in owners for token in range(plan.counts[owner])}


def assert_seen(plan: Plan, rank: int, result: Result) -> None:
    """Everything once, with its owner's numbers, and own work in shares that make a whole."""
    tokens = [(owner, t) for owner, start, stop in result.seen.blocks for t in range(start, stop)]
    assert sorted(tokens) == sorted(expected_tokens(plan, rank, plan.hops))
    assert result.seen.wrong == []
    assert result.clashes == []
    shares = result.seen.shares[0][1]
    assert result.seen.shares == [(share, shares) for share in range(shares)]
    assert result.sent == result.formula


@kinds
@worlds
@back
@pytest.mark.parametrize("tokens", [1, 2, 100])
def test_every_block_of_every_other_rank_is_shown_once(
    ranks: Ranks, kind: str, world: int, back: bool, tokens: int
) -> None:
    """Uneven shards, many pieces and one; gradients of all ranks come home, exactly; the bytes
    counted are those of the formula; and no buffer is used twice at once (fault 5)."""
    plan = Plan(kind, COUNTS[world], tokens)
    for rank, result in enumerate(ranks(world, run_exchange, plan, back)):
        assert_seen(plan, rank, result)
        if back:
            others = [r for r in range(world) if r != rank]
            assert result.totals == wanted_totals(plan, rank, others)


@pytest.mark.parametrize(("world", "hops"), [(2, 0), (3, 0), (3, 1), (4, 1), (4, 2)])
@back
@pytest.mark.parametrize("tokens", [1, 100])
def test_a_ring_goes_as_far_as_it_is_told(
    ranks: Ranks, world: int, back: bool, tokens: int, hops: int
) -> None:
    plan = Plan("ring", COUNTS[world], tokens, hops=hops)
    for rank, result in enumerate(ranks(world, run_exchange, plan, back)):
        assert_seen(plan, rank, result)
        if back:
            seen_by = [(rank + hop) % world for hop in range(1, hops + 1)]
            assert result.totals == wanted_totals(plan, rank, seen_by)
        if not hops:
            assert result.sent == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gather"])
@back
def test_what_is_compressed_travels_as_that_and_arrives_as_it_was(
    ranks: Ranks, kind: str, back: bool
) -> None:
    """Numbers too fine for 16 bits are rounded once, however far they go; sums of gradients travel
    as they are, and bytes are half."""
    for wire in ("bfloat16", "float16"):
        plan = Plan(kind, COUNTS[3], 2, wire=wire, rough=True)
        for rank, result in enumerate(ranks(3, run_exchange, plan, back)):
            assert_seen(plan, rank, result)


@kinds
def test_half_precision_keys_travel_as_they_are(ranks: Ranks, kind: str) -> None:
    plan = Plan(kind, COUNTS[3], 2, dtype="bfloat16")
    for rank, result in enumerate(ranks(3, run_exchange, plan)):
        assert result.seen.wrong == []
        assert {owner for owner, _, _ in result.seen.blocks} == {0, 1, 2} - {rank}
        assert 2 * result.sent == result.formula


@kinds
@worlds
@back
def test_without_communication_everything_is_still_visited(
    ranks: Ranks, kind: str, world: int, back: bool
) -> None:
    """Or the time of computing alone would be that of less computing."""
    plan = Plan(kind, COUNTS[world], 2)
    full = ranks(world, run_exchange, plan, back)
    for one, other in zip(ranks(world, run_exchange, plan, back, False), full, strict=True):
        assert one.sent == 0
        assert other.sent > 0
        for name in ("blocks", "shares", "calls"):
            assert getattr(one.seen, name) == getattr(other.seen, name)


@worlds
@back
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_transfers_run_while_something_is_computed(
    ranks: Ranks, kind: str, world: int, back: bool
) -> None:
    """A transfer that starts after what it could hide behind hides behind nothing. At the end of a
    ring there is nothing left to come, but on the way back the sums of the step before; a gather
    brings the gradients of a piece home before it asks for the next."""
    plan = Plan(kind, COUNTS[world], 2)
    for result in ranks(world, run_exchange, plan, back):
        assert result.seen.calls[0] == "own"
        blocks = result.seen.calls.count("block")
        idle = {
            ("ring", False): ["block", "own"],
            ("ring", True): [],
            ("gather", False): ["block"] * (world - 1),
            ("gather", True): ["block"] * blocks,
        }[kind, back]
        assert result.seen.idle == idle
        if not (kind == "gather" and back):
            assert result.seen.calls[len(result.seen.calls) - len(idle) :] == idle


@pytest.mark.parametrize("tokens", [1, 3, 4, 100])
def test_blocks_are_no_longer_than_the_limit_and_none_is_empty(tokens: int) -> None:
    for counts in ((7, 9, 8), (1, 9), (5,), (40, 39)):
        blocks = KVBlocks(counts, tokens)
        for owner, count in enumerate(counts):
            of_rank = [blocks.block(owner, index) for index in range(blocks.per_rank)]
            # alternately from either half, so not in order; every token in one of them
            covered = [t for block in of_rank for t in range(block.start, block.stop)]
            assert sorted(covered) == list(range(count))
            assert all(1 <= len(block) <= blocks.longest for block in of_rank)
        # the shortest shard has a token for every block
        assert blocks.longest <= max(tokens, -(-max(counts) // min(counts)))


def test_one_rank_sends_nothing() -> None:
    """What it has it computes by itself."""
    for kind in ("ring", "gather"):
        plan = Plan(kind, (6,), 2)
        for both in (False, True):
            result = run_exchange(Group.alone(), plan, both)
            assert (result.seen.blocks, result.sent, result.formula) == ([], 0, 0)
            shares = result.seen.shares[0][1]
            assert result.seen.shares == [(share, shares) for share in range(shares)]
