"""How far along the ranks a segment reaches: so many times the ring passes its blocks on."""

import random
from time import process_time

from longseq_bench.attention.sparse.segments import SegmentTiles
from longseq_bench.distributed.token_order import TokenOrder
from longseq_bench.patterns.dilated import DilatedSegment


def tiles(tokens: int, *segments: int) -> SegmentTiles:
    return SegmentTiles(tokens, tuple(DilatedSegment(s, 1, range(1)) for s in segments), True)


def share_a_segment(first: range, second: range, segments: list[int]) -> bool:
    return any({i // s for i in first} & {i // s for i in second} for s in segments)


def test_the_reach_is_that_of_the_ranks_that_share_a_segment() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        ranks = draw.randint(1, 7)
        tokens = draw.randint(ranks, 40)
        segments = [draw.randint(1, tokens + 3) for _ in range(draw.randint(1, 3))]
        order = TokenOrder("contiguous", tokens, ranks)
        runs = [order.runs(rank)[0] for rank in range(ranks)]
        expected = max(
            high - low
            for low in range(ranks)
            for high in range(low, ranks)
            if low == high or share_a_segment(runs[low], runs[high], segments)
        )
        assert tiles(tokens, *segments).reach(order) == expected
        seen.add(expected)
    assert seen == set(range(7))


def test_the_reach_of_thousands_of_ranks_is_found_at_once() -> None:
    """Each pair of ranks was compared: 1,024 ranks took half a minute."""
    order = TokenOrder("contiguous", 2**30, 2**13)
    start_s = process_time()
    assert tiles(2**30, 2**10, 2**20).reach(order) == 7
    assert process_time() - start_s < 3
