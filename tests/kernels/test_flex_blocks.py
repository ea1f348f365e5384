"""FlexAttention over block layouts: its tables against layouts, its output against the softmax."""

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.core.workload import Scores
from longseq_bench.kernels.cpp_build import COMPILERS
from longseq_bench.kernels.flex_blocks import FlexBlocks, causal_block_mask, compiled
from longseq_bench.meters.memory import StoragePeak
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from tests.kernels import plain_attention

pytestmark = pytest.mark.usefixtures("one_thread")


def listed(counts: Tensor, table: Tensor, head: int) -> list[list[int]]:
    """The lists that FlexAttention reads: the first so many numbers of each row."""
    pairs = zip(table[0, head], counts[0, head].tolist(), strict=False)
    return [row[:many].tolist() for row, many in pairs]


def rows_of(layout: BlockLayout) -> list[list[int]]:
    return [layout.row(i).tolist() for i in range(layout.rows)]


def parts(mask: Any, head: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Blocks seen whole and blocks seen partly, by row."""
    return (
        listed(mask.full_kv_num_blocks, mask.full_kv_indices, head),
        listed(mask.kv_num_blocks, mask.kv_indices, head),
    )


def assert_holds(mask: Any, layout: BlockLayout, head: int = 0) -> None:
    whole, partly = parts(mask, head)
    assert [sorted(a + b) for a, b in zip(whole, partly, strict=True)] == rows_of(layout)
    for i, row in enumerate(partly):
        assert row == ([i] if layout.causal and i in layout.row(i) else [])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_tables_hold_the_layout(pattern: str, causal: bool) -> None:
    """By rows, and by columns for a device that has a backward."""
    special = 32 if pattern in ("global-local", "sink-window") else 0
    layout = make_layout(pattern, 1000, 32, 0.7, causal, special=special)
    mask = FlexBlocks([layout]).prepare("cpu")
    assert_holds(mask, layout)
    assert mask.seq_lengths == (1000, 1000)
    assert mask.BLOCK_SIZE == (32, 32)
    assert (mask.q_indices, mask.full_q_indices) == (None, None)
    mask = FlexBlocks([layout] * 2)._mask(torch.device("cpu"), True)
    assert_holds(mask, layout, 1)
    assert_the_strides_of_one_are_those_of_both(mask)
    seen_by = [list[int]() for _ in range(layout.rows)]
    for i, row in enumerate(rows_of(layout)):
        for key in row:
            seen_by[key].append(i)
    whole = listed(mask.full_q_num_blocks, mask.full_q_indices, 1)
    partly = listed(mask.q_num_blocks, mask.q_indices, 1)
    assert [sorted(a + b) for a, b in zip(whole, partly, strict=True)] == seen_by
    assert [len(row) for row in partly] == [int(causal)] * layout.rows
    assert all(row == sorted(row) for row in whole)


@pytest.mark.parametrize("tokens", [1, 128, 1000])
def test_the_causal_mask_holds_the_triangle(tokens: int) -> None:
    rows = -(-tokens // 128)
    mask = causal_block_mask(tokens, 128, "cpu", True)
    assert (mask.seq_lengths, mask.BLOCK_SIZE) == ((tokens, tokens), (128, 128))
    whole, partly = parts(mask)
    assert [sorted(row) for row in whole] == [list(range(i)) for i in range(rows)]
    assert partly == [[i] for i in range(rows)]
    assert_the_strides_of_one_are_those_of_both(mask)
    whole = listed(mask.full_q_num_blocks, mask.full_q_indices, 0)
    assert whole == [list(range(i + 1, rows)) for i in range(rows)]
    assert listed(mask.q_num_blocks, mask.q_indices, 0) == partly


def assert_the_strides_of_one_are_those_of_both(mask: Any) -> None:
    """torch 2.11 takes the strides and width of the masked blocks for the full ones on CUDA."""
    for side in ("kv", "q"):
        for name in ("num_blocks", "indices"):
            masked = getattr(mask, f"{side}_{name}")
            full = getattr(mask, f"full_{side}_{name}")
            assert (masked.shape, masked.stride()) == (full.shape, full.stride())
            # else torch copies them before each call
            assert masked.storage_offset() % 4 == full.storage_offset() % 4 == 0


def test_the_causal_mask_is_small() -> None:
    """Ten million tokens; dense tables of this many rows take 24 GB each."""
    meter = StoragePeak("cpu")
    with meter:
        mask = causal_block_mask(10_000_000, 128, "cpu", True)
    assert mask.full_q_indices.shape == (1, 1, 78_125, 78_125)
    assert meter.peak < 16 * 4 * 78_125


def several_layouts(tokens: int, block: int, causal: bool) -> list[BlockLayout]:
    """Rows of many widths, and a short last block."""
    names = ("random", "local-window", "strided", "random")
    return [make_layout(p, tokens, block, 0.5, causal, seed=i) for i, p in enumerate(names)]


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("heads_differ", [False, True])
def test_layouts_on_a_gpu_equal_their_definition(heads_differ: bool, causal: bool) -> None:
    layouts = several_layouts(1000, 128, causal)[: 4 if heads_differ else 1]
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, heads, 1000, 64, generator=draw, device="cuda").bfloat16()
        for heads in (4, 2, 2, 4)
    )
    flex = FlexBlocks(layouts)
    out, lse = flex.forward(q, k, v, True)
    assert lse is not None
    got = (out, *flex.backward((grad, q, out, lse), (k, v)))
    on_host = [t.cpu() for t in (q, k, v)]
    masks = plain_attention.masks(layouts)
    want, _, grads = plain_attention.gradients(on_host, grad.cpu(), masks)
    for own, other in zip(got, (want, *grads), strict=True):
        torch.testing.assert_close(own.double().cpu(), other, rtol=4e-2, atol=4e-2)


def test_tables_are_as_small_as_their_widest_row() -> None:
    """A million tokens, 16 blocks a row: a dense table of this many rows takes 256 MiB."""
    layout = make_layout("random", 2**20, 128, 1 - 16 / 2**13, False)
    flex = FlexBlocks([layout])
    mask = flex.prepare("cpu")
    assert int(np.diff(layout.indptr).max()) == 16
    tables = [getattr(mask, name) for name in mask._TENSOR_ATTRS]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tables if t is not None
    }
    held = sum(storage.nbytes() for storage in storages.values())
    # 16 full blocks, room for 4 masked ones, two counts, and one row of the table R wide
    assert held < 4 * 2**13 * (16 + 4 + 2 + 1) + 2**10
    many = int(mask.full_kv_num_blocks[0, 0, 4000])
    assert mask.full_kv_indices[0, 0, 4000, :many].tolist() == layout.row(4000).tolist()
    # what the lowering on a CPU asks for
    assert mask.full_kv_indices.shape == (1, 1, 2**13, 2**13)


def test_what_does_not_suit_is_refused_with_the_reason() -> None:
    layout = make_layout("random", 100, 32, 0.5, True)
    q = torch.zeros(1, 4, 100, 16)
    for layouts, own, keep_lse, words in (
        ([layout], q, True, "not return the log-sum-exp on a CPU"),
        ([layout], q[:, :, :90], False, "prepared for 4 query heads and 100 tokens"),
        ([layout], q[..., :8], False, "head_dim >= 16, not 8"),
        ([layout], q.double(), False, r"no kernel for torch\.float64"),
        ([layout] * 3, q, False, "prepared for 3 query heads"),
    ):
        with pytest.raises((UnsupportedError, UserError), match=words):
            FlexBlocks(layouts).forward(own, q, q, keep_lse)
    with pytest.raises(UnsupportedError, match="no backward on a CPU"):
        FlexBlocks([layout]).backward((q, q, q, q[..., 0]), (q, q))


def test_nothing_runs_uncompiled() -> None:
    import torch._dynamo.config as dynamo

    compiled.cache_clear()
    disabled = dynamo.patch(disable=True)
    with disabled, pytest.raises(UnsupportedError, match=r"torch\.compile is disabled"):
        compiled()


@pytest.mark.slow
def test_compiled_it_equals_its_definition() -> None:
    """Compiling takes most of the time: a short last block, a layout for each head, a soft cap."""
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip(f"there is no {' or '.join(COMPILERS)}")
    draw, layouts = torch.Generator().manual_seed(0), several_layouts(515, 64, True)
    q, k, v = (torch.randn(2, h, 515, 32, generator=draw) for h in (4, 2, 2))
    out, lse = FlexBlocks(layouts, Scores(soft_cap=2.0)).forward(q, k, v, False)
    assert lse is None
    rows, seen = (q.double(), k.double(), v.double()), plain_attention.masks(layouts)
    want, _ = plain_attention.forward(*rows, counts=seen, soft_cap=2.0)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
