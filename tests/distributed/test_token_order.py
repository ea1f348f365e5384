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
    even_span,
    positions_of,
)
from longseq_bench.patterns.visible_keys import as_run, every_position

NAMES: tuple[OrderName, ...] = get_args(OrderName)
names = st.sampled_from(NAMES)
ranks = st.integers(1, 9)


def causal_pairs(order: TokenOrder, rank: int) -> int:
    """Return the causal query-key pairs of a rank's queries, per head."""
    return int((order.positions(rank) + 1).sum())


@given(total=st.integers(0, 300), parts=st.integers(1, 20))
def test_even_parts_are_adjacent_and_differ_by_one_at_most(total: int, parts: int) -> None:
    spans = [even_span(total, parts, part) for part in range(parts)]
    assert (spans[0][0], spans[-1][1]) == (0, total)
    assert all(spans[i][1] == spans[i + 1][0] for i in range(parts - 1))
    sizes = {stop - start for start, stop in spans}
    assert max(sizes) - min(sizes) <= 1


@given(data=st.data(), start=st.integers(0, 3_000_000), tokens=st.integers(1, 50))
def test_a_run_of_positions_is_handled_as_any_other_array(
    data: st.DataObject, start: int, tokens: int
) -> None:
    """Without reading it: see `as_run`."""
    run = every_position(start + tokens)[start:]
    copied = run.copy()
    assert (as_run(run), as_run(copied)) == (range(start, start + tokens), None)
    assert fingerprint(run) == fingerprint(copied)
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, start + tokens + 5)))))
    for got, expected in zip(find_rows(run, rows), find_rows(copied, rows), strict=True):
        assert got.tolist() == expected.tolist()
    assert tokens < 3 or as_run(run[::2]) is None


@given(name=names, more=st.integers(0, 190), p=ranks)
@example(name="zigzag", more=1, p=4)
def test_every_token_is_on_one_rank(name: OrderName, more: int, p: int) -> None:
    """For any number of tokens with at least one per rank; no run is empty."""
    order = TokenOrder(name, p + more, p)
    positions = [order.positions(rank) for rank in range(p)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(p + more))
    for rank in range(p):
        assert order.counts[rank] == len(positions[rank])
        assert all(len(run) for run in order.runs(rank))
        assert positions_of(order.runs(rank)).tolist() == positions[rank].tolist()
    assert min(order.counts) >= 1
    assert max(order.counts) - min(order.counts) <= 2


def test_the_positions_of_each_order() -> None:
    def positions(name: OrderName) -> list[list[int]]:
        return [TokenOrder(name, 12, 3).positions(rank).tolist() for rank in range(3)]

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
