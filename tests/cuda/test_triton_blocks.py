"""The Triton kernels on a GPU against dense masked softmax in float64 on the same device.

tests/kernels/test_triton_blocks.py has more cases, in Triton's interpreter on a CPU.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import make_layout
from tests.kernels import plain_attention
from tests.kernels.test_triton_blocks import PassResult, assert_passed, inputs, run

pytestmark = pytest.mark.cuda

BLOCK = 128
WHOLE, TAIL = 4 * BLOCK, 4 * BLOCK - 21
"""Tokens with and without a short last block."""

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _true_float32() -> None:
    """The reference is float64; TF32 would only blur what the kernels do."""
    torch.backends.cuda.matmul.allow_tf32 = False


def on_device(
    tokens: int, dtype: torch.dtype, heads: tuple[int, int] = (2, 1), dim: int = 64, batch: int = 1
) -> tuple[list[Tensor], Tensor]:
    tensors, grad_out = inputs(tokens, dtype, heads, dim, batch)
    return [t.cuda() for t in tensors], grad_out.cuda()


def assert_right(
    layouts: Sequence[BlockLayout], tensors: Sequence[Tensor], grad_out: Tensor
) -> PassResult:
    got = run(layouts, tensors, grad_out)
    masks = plain_attention.masks(layouts)
    expected = PassResult(*plain_attention.gradients(tensors, grad_out, masks))
    assert_passed(got, expected, grad_out.dtype)
    return got


@pytest.mark.parametrize("tokens", [WHOLE, TAIL], ids=["whole", "tail"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_head_dim_mask_and_tail(
    dtype: torch.dtype, dim: int, causal: bool, tokens: int
) -> None:
    """The kernels pad 80 to 128. Two query heads share a KV head."""
    layout = make_layout("random", tokens, BLOCK, 0.5, causal)
    assert_right([layout], *on_device(tokens, dtype, dim=dim))


@pytest.mark.parametrize("block", [16, 32, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_block(dtype: torch.dtype, block: int) -> None:
    layout = make_layout("random", 5 * block - 3, block, 0.4, True)
    assert_right([layout], *on_device(5 * block - 3, dtype))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_batches_and_groups(heads: tuple[int, int], causal: bool) -> None:
    layout = make_layout("random", TAIL, BLOCK, 0.5, causal)
    assert_right([layout], *on_device(TAIL, torch.bfloat16, heads, batch=2))


@pytest.mark.parametrize("pattern", ["global-local", "sink-window"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows_and_columns_are_split(dim: int, causal: bool, pattern: str) -> None:
    """One row or column sees all blocks, the others few; several programs share it."""
    tokens, block = 4096 - 21, 16
    layout = make_layout(pattern, tokens, block, 0.97, causal, special=block)
    assert WorkItems.of_columns([layout], 2, torch.device("cpu")).slots
    got = assert_right([layout], *on_device(tokens, torch.bfloat16, dim=dim))
    assert torch.isfinite(got.lse).all()
