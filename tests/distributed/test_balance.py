"""Tokens assigned to ranks by their visible pairs."""

from typing import get_args

import numpy as np
import pytest

from longseq_bench.core.masks import parse_mask
from longseq_bench.distributed.token_order import OrderName, TokenOrder, balanced_runs, positions_of
from longseq_bench.patterns.visible_keys import VisibleKeys

MASKS = (
    "full", "causal", "sliding-window:5", "sliding-window:4k", "prefix:7", "documents:6",
    "full-documents:6", "documents:10,5,15", "full-documents:10,5,15",
)  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_intervals_and_pairs_agree_with_each_other(mask: str) -> None:
    """Keys of queries, queries of keys, and pairs before a position: each from the others."""
    visible, positions = VisibleKeys(parse_mask(mask), 30), np.arange(30)
    first, stop = visible.first(positions), visible.stop(positions)
    pairs = visible.multiplicity(positions, positions)
    assert (pairs.sum(1) == stop - first).all()
    starts, ends = visible.first_query(positions), visible.stop_query(positions)
    of_keys = (positions[:, None] >= starts) & (positions[:, None] < ends)
    assert (pairs == of_keys).all()
    before = np.concatenate(([0], np.cumsum(stop - first)))
    assert [visible.mask.pairs_before(i, 30) for i in range(31)] == before.tolist()
    assert before[-1] == visible.pairs(positions) == visible.mask.visible_pairs(30)
    for asked in (positions[1::4], positions[[2, 3, 28]], positions[:0]):
        assert visible.pairs(asked) == pairs[asked].sum()
    for runs in ((range(3, 9), range(20, 30)), (range(1, 30, 4),), ()):
        assert visible.pairs(runs) == pairs[positions_of(runs)].sum()


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    "mask",
    ["sliding-window:4k", "prefix:8k", "documents:chatqa2@1", "full-documents:chatqa2",
     "documents:100,65000,436", "documents:1k"],
)  # fmt: skip
def test_ranks_have_as_many_tokens_and_pairs(mask: str, ranks: int) -> None:
    visible = VisibleKeys(parse_mask(mask), 65_536)
    runs = balanced_runs(visible, ranks)
    positions = [np.concatenate([np.arange(r.start, r.stop) for r in own]) for own in runs]
    assert (np.sort(np.concatenate(positions)) == np.arange(65_536)).all()
    assert all((np.diff(own) > 0).all() for own in positions)
    pairs = [visible.pairs(own) for own in positions]
    assert max(pairs) * ranks / sum(pairs) < 1.05
    counts = [len(own) for own in positions]
    assert max(counts) - min(counts) <= 4 + 65_536 // 512


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_causal_mask_gives_the_zigzag_of_two_runs(ranks: int) -> None:
    runs = balanced_runs(VisibleKeys(parse_mask("causal"), 4096), ranks)
    zigzag = TokenOrder("zigzag", 4096, ranks)
    for rank, own in enumerate(runs):
        assert positions_of(own).tolist() == positions_of(zigzag.runs(rank)).tolist()


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("name", get_args(OrderName))
@pytest.mark.parametrize("mask", MASKS[2:])
def test_keys_are_seen_as_many_ranks_ahead_as_pairs_say(
    mask: str, name: OrderName, ranks: int
) -> None:
    visible = VisibleKeys(parse_mask(mask), 30)
    order = TokenOrder(name, 30, ranks, visible)
    owners, places = np.empty(30, int), [positions_of(order.runs(rank)) for rank in range(ranks)]
    for rank, own in enumerate(places):
        owners[own] = rank
    i, j = np.nonzero(visible.multiplicity(np.arange(30), np.arange(30)))
    farthest = int(((owners[i] - owners[j]) % ranks).max())
    # what lies between two tokens of a strided run counts as seen
    assert farthest <= order.hops <= (farthest if name != "striped" else ranks - 1)


def test_documents_that_no_rank_shares_are_not_sent() -> None:
    whole = VisibleKeys(parse_mask("documents:4k"), 16_384)
    assert [TokenOrder("zigzag", 16_384, ranks, whole).hops for ranks in (2, 4)] == [0, 0]
    window = VisibleKeys(parse_mask("sliding-window:1k"), 16_384)
    assert TokenOrder("contiguous", 16_384, 8, window).hops == 1
    assert TokenOrder("contiguous", 16_384, 8).hops == 7
