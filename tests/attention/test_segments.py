"""Tiles of segments on one rank and over ranks."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.attention.sparse.segments import SegmentTiles
from longseq_bench.core.model import Workload
from longseq_bench.kernels.tiling import RowBlock
from longseq_bench.patterns.dilated import DilationRule, hilbert_order
from longseq_bench.testing.contract import assert_equals_reference, make_workload


def counts_of(blocks: Iterable[RowBlock], queries: int, keys: int, head: int) -> np.ndarray:
    """Return how often the pieces of row blocks show each key to each query, (queries, keys)."""
    counts = np.zeros((queries, keys), dtype=np.int64)
    for block in blocks:
        rows = torch.arange(queries)[block.rows]
        for piece in block.pieces:
            if head in range(8)[piece.heads]:
                own, seen = rows[piece.rows], torch.arange(keys)[piece.keys]
                if piece.sets > 1:
                    places = torch.arange(piece.sets)[:, None] * piece.apart
                    own, seen = own + places, seen + places
                mask = (
                    torch.ones(own.shape[-1], seen.shape[-1]) if piece.mask is None else piece.mask
                )
                visible = (mask.tril() if piece.causal else mask).numpy().astype(np.int64)
                for q, k in zip(np.atleast_2d(own), np.atleast_2d(seen), strict=True):
                    np.add.at(counts, (q[:, None], k[None, :]), visible)
    return counts


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 120),
    pairs=st.lists(st.tuples(st.integers(1, 130), st.integers(1, 5)), min_size=1, max_size=3),
    max_rows=st.integers(1, 130),
    ends=st.tuples(*[st.integers(0, 119)] * 4),
    causal=st.booleans(),
    permuted=st.booleans(),
    batch=st.integers(1, 2),
)
def test_tiles_are_the_rule(
    n: int, pairs: list[tuple[int, int]], max_rows: int, ends: tuple[int, ...], causal: bool,
    permuted: bool, batch: int,
) -> None:  # fmt: skip
    """On one rank, and for queries and keys at any steps of the walk."""
    rule = DilationRule(*zip(*pairs, strict=True), heads=3)
    w = Workload(seq_len=n, batch=batch, heads=3, head_dim=16, causal=causal)
    tiles = SegmentTiles(w, tuple(rule.pairs()))
    tiles.walk = hilbert_order(n) if permuted else None
    order = hilbert_order(n) if permuted else np.arange(n)
    step_of, at = np.argsort(order).astype(np.int32), np.arange(n)
    own, keys = (
        range(min(a, b, n - 1), min(max(a, b), n - 1) + 1) for a, b in (ends[:2], ends[2:])
    )
    for head in range(3):
        expected = rule.multiplicity(at, at, head, causal, step_of)
        heads = slice(head, head + 1)
        found = counts_of(tiles.single_rank(heads, max_rows), n, n, head)
        assert (found == expected).all()
        queries = own[len(own) // 3 :]
        found = counts_of(
            tiles.many_ranks(heads, own, queries, keys, max_rows), len(own), len(keys), head
        )
        expected = expected[order[own.start : own.stop]][:, order[keys.start : keys.stop]]
        expected[: len(own) // 3] = 0
        assert (found == expected).all()


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_sets_of_one_sequence_equal_the_reference(causal: bool, mode: str) -> None:
    """They are strided views of a batch of 1; the last segment is short, and others are cut."""
    options = {"segments": (16, 64), "dilation": (1, 3), "kernel": "aten-flash-cpu"}
    w = make_workload(197, batch=1, kv_heads=2, causal=causal, mode=mode)
    assert_equals_reference("dilated", options, w)
