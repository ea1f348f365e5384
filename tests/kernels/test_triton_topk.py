"""The choice of blocks on CUDA, in Triton's interpreter, against that of a CPU."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.sparse.topk import empty_layout, top_layout
from longseq_bench.kernels import work_items
from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.patterns.block_layout import BlockLayout
from tests.kernels.test_triton_blocks import PassResult, assert_passed, inputs
from tests.kernels.test_work_items import lists_of
from tests.kernels.triton_interpreter import Interpreted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed"),
]
BLOCK = 16


def choose(
    places: BlockLayout, queries: Tensor, keys: Tensor, patches: dict[str, int] | None = None
) -> Any:
    """Return the blocks chosen by the product of queries (Hq, rows, C) and keys (Hk, rows, C)."""
    from longseq_bench.kernels import triton_topk

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (patches or {}).items():
            patch.setattr(triton_topk, name, value)
        return triton_topk.TopBlocks(places, len(queries)).choose(queries, keys)


def layouts_of(*args: Any) -> tuple[BlockLayout, ...]:
    layouts: tuple[BlockLayout, ...] = choose(*args).to_host()
    return layouts


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("kind", ["normal", "equal", "infinite", "in parts"])
def test_the_same_blocks_as_on_a_cpu(interpreted: Interpreted, kind: str, causal: bool) -> None:
    """Bit for bit, also of equal scores, and in chunks of rows and tiles of a row."""
    draw, rows = np.random.default_rng(3), 21
    places = empty_layout(rows * BLOCK - 3, BLOCK, 0.6, causal)
    queries = torch.from_numpy(draw.standard_normal((2, rows, rows)).astype(np.float32))
    keys, values = torch.eye(rows).expand(2, -1, -1), [0.0, -0.0, 1.5, -2.0, 1e-42, -1e-42, 3e38]
    if kind in ("equal", "in parts"):
        queries = torch.from_numpy(draw.choice(np.float32(values), queries.shape))
    if kind == "infinite":
        queries = torch.from_numpy(draw.choice(np.float32([1, -1]), (2, rows, 1)))
        keys = torch.from_numpy(draw.choice(np.float32([np.inf, *values]), (2, rows, 1)))
    patches = {"CHUNK": 2 * rows * 4, "MAX_TILE": 8} if kind == "in parts" else {}
    for head, own in enumerate(interpreted(layouts_of, places, queries, keys, patches)):
        scores = queries[head] @ keys[head].T
        expected = top_layout(
            lambda a, b, scores=scores: scores[a:b], places.seq_len, BLOCK, 0.6, causal
        )
        assert np.array_equal(own.indptr, expected.indptr)
        assert np.array_equal(own.indices, expected.indices)


def test_a_nan_is_a_score(interpreted: Interpreted) -> None:
    """Every row has as many blocks as it should, so that a kernel reads no other memory."""
    queries, keys = torch.ones(1, 6, 1), torch.ones(1, 6, 1)
    keys[0, 2:5] = torch.nan
    places = empty_layout(6 * BLOCK, BLOCK, 0.5, True)
    (layout,) = interpreted(layouts_of, places, queries, keys)
    for row in range(6):
        kept = layout.row(row).tolist()
        assert kept == sorted(set(kept) & set(range(row + 1)))
        assert row in kept


# ---- lists of columns, and passes ----------------------------------------------------------------

SPLIT = {"SHORTEST_SPLIT": 2, "MEANS": 2, "ROWS_PER_SLOT": 2}


def columns_of(group: int, *args: Any) -> tuple[tuple[BlockLayout, ...], WorkItems]:
    with pytest.MonkeyPatch.context() as patch:
        for name, number in SPLIT.items():
            patch.setattr(work_items, name, number)
        chosen = choose(*args)
        return chosen.to_host(), chosen.columns(torch.device("cpu"), group)


@pytest.mark.parametrize(
    ("group", "causal", "tokens"), [(1, True, 20 * BLOCK), (2, False, 20 * BLOCK - 5)]
)
def test_columns_are_those_of_the_rows(
    interpreted: Interpreted, group: int, causal: bool, tokens: int
) -> None:
    """Their items have every entry once, and a mask where one is needed; one column is long."""
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 20, 4), torch.randn(2 // group, 20, 4)
    keys[:, 3] = 0
    queries[..., 0], keys[:, 3, 0] = 9, 9
    places = empty_layout(tokens, BLOCK, 0.8, causal)
    layouts, got = interpreted(columns_of, group, places, queries, keys)
    expected = WorkItems.of_columns(layouts, group, torch.device("cpu"))
    is_short = tokens % BLOCK > 0
    for kv_head in range(2 // group):
        found = lists_of(got, kv_head)
        assert found == lists_of(expected, kv_head)
        assert len(found[3]) > 10
        split = [column for column, first, count in got.splits[kv_head].tolist() if count]
        assert 3 in split
        for (column, slot), (begin, start, stop, end) in zip(
            got.places[kv_head].tolist(), got.bounds[kv_head].tolist(), strict=True
        ):
            assert (slot >= 0) == (column in split)
            assert slot < 0 or end - begin < len(found[column])
            for at in range(begin, end):
                block = int(got.indices[at]) // group
                needs = (causal and block == column) or (is_short and block == 19)
                assert not (needs and start <= at < stop)


def run_chosen(
    places: BlockLayout, scores: tuple[Tensor, Tensor], tensors: list[Tensor], grad_out: Tensor
) -> tuple[tuple[BlockLayout, ...], PassResult]:
    with pytest.MonkeyPatch.context() as patch:
        for name, number in SPLIT.items():
            patch.setattr(work_items, name, number)
        chosen = choose(places, *scores)
        out, lse = chosen.forward(*tensors, True)
        q, k, v = tensors
        grads = chosen.backward((grad_out, q, out, lse), (k, v))
        return chosen.to_host(), PassResult(out, lse, grads)


@pytest.mark.parametrize(("causal", "tokens"), [(True, 75), (False, 75), (False, 128)])
def test_a_pass_equals_its_definition(interpreted: Interpreted, causal: bool, tokens: int) -> None:
    """With grouped heads, long columns, and a short last block."""
    torch.manual_seed(0)
    rows = -(-tokens // BLOCK)
    scores = torch.randn(4, rows, 4), torch.randn(2, rows, 4)
    places = empty_layout(tokens, BLOCK, 0.5, causal)
    tensors, grad_out = inputs(tokens, heads=(4, 2))
    layouts, got = interpreted(run_chosen, places, scores, tensors, grad_out)
    assert len({layout.indices.tobytes() for layout in layouts}) > 2
    assert_passed(got, layouts, tensors, grad_out)
