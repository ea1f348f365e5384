"""Pieces of segments on one rank and over ranks, and calls of whole heads."""

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
from longseq_bench.core.model import Mode, Workload
from longseq_bench.kernels.tiling import Piece
from longseq_bench.patterns.dilated import DilationRule, hilbert_order
from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import Options


def counts_of(pieces: Iterable[Piece], queries: int, keys: int, head: int) -> np.ndarray:
    """Return how often pieces show each key to each query, (queries, keys)."""
    counts = np.zeros((queries, keys), dtype=np.int64)
    for piece in pieces:
        heads = range(8)[piece.heads]
        if head not in heads:
            continue
        place = heads.index(head)
        if piece.index is not None:
            own = seen = piece.index[:, place % piece.index.shape[1]]
        else:
            further = place * piece.shift + torch.arange(piece.sets)[:, None] * piece.apart
            own, seen = (
                torch.arange(count)[places] + further
                for count, places in ((queries, piece.rows), (keys, piece.keys))
            )
        mask = torch.ones(own.shape[-1], seen.shape[-1]) if piece.mask is None else piece.mask
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
        sizes = replace(tiles.SIZES["cpu"], rows=max_rows, min_bytes=max_rows * 64)
        assert (counts_of(alone.whole(sizes), n, n, head) == expected).all()
        queries = own[len(own) // 3 :]
        found = counts_of(many.pieces(heads, own, queries, keys), len(own), len(keys), head)
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
    """They are strided views or copies, as on a GPU; 40 rows are less than some segments."""
    options, fields = CASES[case]
    sizes = replace(tiles.SIZES["cpu"], rows=rows, min_bytes=3 * rows * 16 * 4)
    monkeypatch.setitem(tiles.SIZES, "cpu", sizes)
    w = make_workload(197, **{"batch": 1, "heads": 8, "causal": causal, "mode": "train", **fields})
    assert_equals_reference(name, options | {"kernel": "aten-flash-cpu"}, w)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "mode", "runs"),
    [(8, 8, "train", 4), (16, 8, "train", 8), (8, 2, "train", 0), (8, 8, "forward", 1)],
)
def test_calls_of_whole_heads_equal_the_reference(
    heads: int, kv_heads: int, mode: Mode, runs: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ring` calls its kernel on a GPU; four query heads of a KV head would take more memory."""
    two_heads = 2 * 2 * 197 * 16 * 2
    sizes = replace(tiles.SIZES["cpu"], is_host=False, min_bytes=two_heads)
    monkeypatch.setitem(tiles.SIZES, "cpu", sizes)
    shape = {"batch": 2, "heads": heads, "kv_heads": kv_heads}
    w = make_workload(197, **shape, causal=causal, mode=mode, dtype="bfloat16")
    assert len(tiles.whole_runs(w, sizes)) == runs
    assert_equals_reference("ring", {"kernel": "aten-flash-cpu"}, w)
