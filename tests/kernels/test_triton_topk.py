"""The choice of blocks on CUDA, in Triton's interpreter, against that of a CPU."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.sparse.block_sparse_adaptive import (
    AdaptiveBlockSparse,
    empty_layout,
    top_layout,
)
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import work_items
from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.testing.definition import make_inputs, make_output_gradient
from tests.kernels.test_work_items import assert_masked_at_the_ends, lists_of
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


def columns_of(places: BlockLayout, queries: Tensor, keys: Tensor) -> tuple[WorkItems, Any]:
    """Return the columns of what is chosen, with split ones, and the layouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longseq_bench.kernels.triton_topk.SHORTEST_SPLIT", 2)
        chosen = choose(places, queries, keys, {"MAX_TILE": 32})
        return chosen.columns(torch.device("cpu"), len(queries) // len(keys)), chosen.to_host()


@pytest.mark.parametrize(("group", "causal"), [(1, False), (2, True)])
def test_the_columns_are_those_of_a_cpu(interpreted: Interpreted, group: int, causal: bool) -> None:
    """Ascending, every block in one item; one column is seen by all rows, and is split."""
    rows, draw = 22, torch.Generator().manual_seed(5)
    places = empty_layout(rows * BLOCK - 3, BLOCK, 0.8, causal)
    queries, keys = (torch.randn(heads, rows, 4, generator=draw) for heads in (2 * group, 2))
    keys[:, 3], queries[..., 0] = torch.tensor([99.0, 0, 0, 0]), 1.0
    items, layouts = interpreted(columns_of, places, queries, keys)
    expected = WorkItems.of_columns(layouts, group, torch.device("cpu"))
    for head in range(2):
        lists = lists_of(expected, head)
        assert lists_of(items, head) == lists
        longest = int((items.bounds[head, :, 3] - items.bounds[head, :, 0]).max())
        assert longest <= len(lists[3]) / 2
        # a column that is whole has no slots to join
        assert 1 not in items.splits[head, :, 2]
        ((first, count),) = [s[1:] for s in items.splits[head].tolist() if s[0] == 3 and s[2]]
        slots = [slot for block, slot in items.places[head].tolist() if block == 3]
        assert slots == [*range(first, first + count), -1]
    assert_masked_at_the_ends(items, places, group * (1 + causal), group)


def run_adaptive(device: str, causal: bool) -> tuple[Tensor, list[Tensor], Any]:
    """Run the attention as on a device, on tensors of the CPU; columns are split."""
    w = Workload(seq_len=91, batch=2, heads=4, kv_heads=2, head_dim=16, causal=causal, mode="train")
    attention = AdaptiveBlockSparse(w, Group.alone(), block=BLOCK, sparsity=0.5)
    attention.prepare(device)
    tensors = make_inputs(w)
    with pytest.MonkeyPatch.context() as patch:
        for name, number in {"SHORTEST_SPLIT": 2, "MEANS": 1, "ROWS_PER_SLOT": 1}.items():
            patch.setattr(work_items, name, number)
        if device == "cuda":
            patch.setattr("longseq_bench.kernels.triton_topk.SHORTEST_SPLIT", 2)
        out = attention(*tensors)
        out.backward(make_output_gradient(w))
    return out.detach(), [t.grad for t in tensors if t.grad is not None], attention.layouts


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_the_attention_is_that_of_a_cpu(interpreted: Interpreted, causal: bool) -> None:
    """With two sequences, whose scores are added, grouped heads, and a short last block."""
    out, grads, layouts = run_adaptive("cpu", causal)
    own_out, own_grads, own_layouts = interpreted(run_adaptive, "cuda", causal)
    for own, layout in zip(own_layouts, layouts, strict=True):
        assert np.array_equal(own.indices, layout.indices)
    for own, expected in zip([own_out, *own_grads], [out, *grads], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
