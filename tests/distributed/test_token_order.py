"""Assignments of tokens to ranks, and the visible tiles of queries and keys at given positions."""

from typing import get_args

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from longseq_bench.distributed.shard import find_rows, fingerprint
from longseq_bench.distributed.token_order import (
    OrderName,
    TokenOrder,
    causal_tiles,
    count_tokens,
    even_span,
    positions_of,
)

NAMES: tuple[OrderName, ...] = get_args(OrderName)
names = st.sampled_from(NAMES)
ranks = st.integers(1, 9)


def causal_pairs(order: TokenOrder, rank: int) -> int:
    """Return the causal query-key pairs of a rank's queries, per head."""
    return int((positions_of(order.runs(rank)) + 1).sum())


@given(total=st.integers(0, 300), parts=st.integers(1, 20))
def test_even_parts_are_adjacent_and_differ_by_one_at_most(total: int, parts: int) -> None:
    spans = [even_span(total, parts, part) for part in range(parts)]
    assert (spans[0][0], spans[-1][1]) == (0, total)
    assert all(spans[i][1] == spans[i + 1][0] for i in range(parts - 1))
    sizes = {stop - start for start, stop in spans}
    assert max(sizes) - min(sizes) <= 1


@given(data=st.data(), name=names, tokens=st.integers(1, 300), p=ranks)
def test_runs_are_handled_as_the_array_of_their_positions(
    data: st.DataObject, name: OrderName, tokens: int, p: int
) -> None:
    start = data.draw(st.sampled_from([0, 3_000_000]))
    order, rank = TokenOrder(name, p + tokens, p), data.draw(st.integers(0, p - 1))
    runs = tuple(range(r.start + start, r.stop + start, r.step) for r in order.runs(rank))
    positions = positions_of(runs)
    assert count_tokens(runs) == count_tokens(positions)
    assert fingerprint(runs) == fingerprint(positions)
    rows = sorted(data.draw(st.sets(st.integers(start, start + tokens + p + 5))))
    found, expected = (find_rows(own, torch.tensor(rows).long()) for own in (runs, positions))
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]


@given(name=names, more=st.integers(0, 190), p=ranks)
@example(name="zigzag", more=1, p=4)
def test_every_token_is_on_one_rank(name: OrderName, more: int, p: int) -> None:
    """For any number of tokens with at least one per rank; no run is empty."""
    order = TokenOrder(name, p + more, p)
    positions = [positions_of(order.runs(rank)) for rank in range(p)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(p + more))
    for rank in range(p):
        assert order.counts[rank] == len(positions[rank])
        assert all(len(run) for run in order.runs(rank))
    assert min(order.counts) >= 1
    assert max(order.counts) - min(order.counts) <= 2


def test_the_positions_of_each_order() -> None:
    def positions(name: OrderName) -> list[list[int]]:
        return [positions_of(TokenOrder(name, 12, 3).runs(rank)).tolist() for rank in range(3)]

    assert positions("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert positions("zigzag") == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert positions("striped") == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@given(more=st.integers(0, 490), p=st.integers(2, 9), name=st.sampled_from(["zigzag", "striped"]))
def test_causal_work_is_even_in_zigzag_and_striped(more: int, p: int, name: OrderName) -> None:
    tokens = p + more
    order = TokenOrder(name, tokens, p)
    pairs = [causal_pairs(order, rank) for rank in range(p)]
    # one or two tokens more or less, each of which sees at most all tokens
    assert max(pairs) - min(pairs) <= 2 * tokens
    uneven = TokenOrder("contiguous", 500, 4)
    assert causal_pairs(uneven, 3) - causal_pairs(uneven, 0) > 50 * 500


def covered(rows: range, keys: range) -> np.ndarray:
    """Return how often the tiles contain each pair of row and key."""
    table = np.zeros((len(rows), len(keys)), dtype=int)
    for tile in causal_tiles(rows, keys):
        part = table[tile.rows, tile.keys]
        assert part.size, "an empty tile"
        if tile.causal:
            assert part.shape[0] == part.shape[1], "a triangle has equal sides"
        part += np.tri(*part.shape, dtype=int) if tile.causal else 1
    return table


@given(
    step=st.integers(1, 5),
    first_row=st.integers(0, 40),
    first_key=st.integers(0, 40),
    rows=st.integers(1, 12),
    keys=st.integers(1, 12),
)
def test_tiles_contain_exactly_the_visible_pairs(
    step: int, first_row: int, first_key: int, rows: int, keys: int
) -> None:
    queries = range(first_row, first_row + rows * step, step)
    others = range(first_key, first_key + keys * step, step)
    visible = np.array(others)[None, :] <= np.array(queries)[:, None]
    assert (covered(queries, others) == visible).all()
