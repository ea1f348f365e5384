"""Tiles of segments on one rank and over ranks."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.attention import tiles
from longseq_bench.attention.sparse.segments import SegmentTiles
from longseq_bench.core.model import Workload
from longseq_bench.kernels.tiling import RowBlock
from longseq_bench.patterns.dilated import DilationRule, hilbert_order
from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import Options


def counts_of(blocks: Iterable[RowBlock], queries: int, keys: int, head: int) -> np.ndarray:
    """Return how often the pieces of row blocks show each key to each query, (queries, keys)."""
    counts = np.zeros((queries, keys), dtype=np.int64)
    for block in blocks:
        rows, tokens = torch.arange(queries)[block.rows], torch.arange(keys)
        if isinstance(block.rows, torch.Tensor):
            tokens = rows
        heads = range(8)[block.heads]
        for piece in block.pieces:
            own_heads = range(8)[piece.heads]
            if head in own_heads and head in heads:
                further = own_heads.index(head) * piece.shift
                further += torch.arange(piece.sets)[:, None] * piece.apart
                own, seen = (
                    run[torch.arange(len(run))[places] + further]
                    for run, places in ((rows, piece.rows), (tokens, piece.keys))
                )
                mask = (
                    torch.ones(own.shape[-1], seen.shape[-1]) if piece.mask is None else piece.mask
                )
                visible = (mask.tril() if piece.causal else mask).numpy().astype(np.int64)
                for q, k in zip(np.atleast_2d(own), np.atleast_2d(seen), strict=True):
                    np.add.at(counts, (q[:, None], k[None, :]), visible)
    return counts


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 120),
    pairs=st.lists(st.tuples(st.integers(1, 130), st.integers(1, 5)), min_size=1, max_size=3),
    max_rows=st.integers(1, 130),
    ends=st.tuples(*[st.integers(0, 119)] * 4),
    causal=st.booleans(),
    permuted=st.booleans(),
    batch=st.integers(1, 2),
    group=st.sampled_from([1, 2, 4]),
)
def test_tiles_are_the_rule(
    n: int, pairs: list[tuple[int, int]], max_rows: int, ends: tuple[int, ...], causal: bool,
    permuted: bool, batch: int, group: int,
) -> None:  # fmt: skip
    """On one rank, and for queries and keys at any steps of the walk."""
    rule = DilationRule(*zip(*pairs, strict=True), heads=8)
    w = Workload(seq_len=n, batch=batch, heads=8, kv_heads=8 // group, head_dim=16, causal=causal)
    alone, many = SegmentTiles(w, tuple(rule.pairs())), SegmentTiles(w, tuple(rule.pairs()))
    order = hilbert_order(n) if permuted else np.arange(n)
    if permuted:
        alone.follow(order, "cpu")
        many.walk = order if causal else None
    step_of, at = np.argsort(order).astype(np.int32), np.arange(n)
    own, keys = (
        range(min(a, b, n - 1), min(max(a, b), n - 1) + 1) for a, b in (ends[:2], ends[2:])
    )
    for head in (0, 3, 5, 6):
        expected = rule.multiplicity(at, at, head, causal, step_of)
        heads = slice(head // 4 * 4, head // 4 * 4 + 4)
        every, most = range(n), alone.rows_of_a_block(max_rows)
        found = counts_of(alone.blocks(heads, every, every, every, most), n, n, head)
        assert (found == expected).all()
        queries = own[len(own) // 3 :]
        found = counts_of(
            many.blocks(heads, own, queries, keys, max_rows), len(own), len(keys), head
        )
        expected = expected[order[own.start : own.stop]][:, order[keys.start : keys.stop]]
        expected[: len(own) // 3] = 0
        assert (found == expected).all()


SIX_HEADS = {"heads": 6, "kv_heads": 3}
CASES: dict[str, tuple[Options, dict[str, Any]]] = {
    "grouped heads": ({"segments": (16, 64), "dilation": (1, 3)}, {"kv_heads": 2}),
    "a rate of the KV group": ({"segments": (16, 64), "dilation": (1, 2)}, {"kv_heads": 4}),
    "more heads than offsets": ({"segments": (16, 50), "dilation": (1, 4)}, {}),
    "groups": ({"segments": (13, 64), "dilation": (2, 16), "mix": "groups"}, SIX_HEADS),
    "a batch": ({"segments": (16, 40), "dilation": (3, 12)}, {"batch": 2, "kv_heads": 1}),
    "a segment for all": ({"segments": (24, 500), "dilation": (1, 5)}, {}),
    "three pairs": ({"segments": (16, 32, 64), "dilation": (1, 2, 3)}, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("rows", [1024, 40])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["dilated", "hilbert"])
@pytest.mark.parametrize("case", CASES)
def test_sets_on_one_rank_equal_the_reference(
    case: str, name: str, causal: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are strided views, as on a GPU; 40 rows are less than a segment, which is cut."""
    options, fields = CASES[case]
    sizes = replace(tiles.SIZES["cpu"], rows=rows, min_bytes=3 * rows * 16 * 4)
    monkeypatch.setitem(tiles.SIZES, "cpu", sizes)
    w = make_workload(197, **{"batch": 1, "heads": 8, "causal": causal, "mode": "train", **fields})
    assert_equals_reference(name, options | {"kernel": "aten-flash-cpu"}, w)
