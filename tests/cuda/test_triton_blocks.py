"""The Triton kernels on a GPU against dense masked softmax in float64 on the same device.

tests/kernels/test_triton_blocks.py has more cases, in Triton's interpreter on a CPU.
"""

from typing import Any

import pytest
import torch

from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.patterns.blocks import make_layout
from tests.kernels.plain_attention import inputs
from tests.kernels.test_triton_blocks import assert_right

pytestmark = pytest.mark.cuda

BLOCK = 128
WHOLE, TAIL = 4 * BLOCK, 4 * BLOCK - 21
"""Tokens with and without a short last block."""

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _true_float32() -> None:
    """The reference is float64; TF32 would only blur what the kernels do."""
    torch.backends.cuda.matmul.allow_tf32 = False


causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def call_here(function: Any, *args: Any) -> Any:
    return function(*args)


def assert_pattern(
    pattern: str,
    tokens: int,
    block: int,
    sparsity: float,
    causal: bool,
    dtype: torch.dtype,
    **shape: Any,
) -> None:
    special = block if pattern in ("global-local", "sink-window") else 0
    layout = make_layout(pattern, tokens, block, sparsity, causal, special=special)
    assert WorkItems.of_columns([layout], 2, torch.device("cpu")).slots or not special
    tensors, grad_out = inputs(tokens, dtype, **{"dim": 64} | shape)
    got = assert_right(call_here, [layout], [t.cuda() for t in tensors], grad_out.cuda())
    assert torch.isfinite(got.lse).all()


@pytest.mark.parametrize("tokens", [WHOLE, TAIL], ids=["whole", "tail"])
@causality
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_head_dim_mask_and_tail(
    dtype: torch.dtype, dim: int, causal: bool, tokens: int
) -> None:
    """The kernels pad 80 to 128. Two query heads share a KV head."""
    assert_pattern("random", tokens, BLOCK, 0.5, causal, dtype, dim=dim)


@pytest.mark.parametrize("block", [16, 32, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_block(dtype: torch.dtype, block: int) -> None:
    assert_pattern("random", 5 * block - 3, block, 0.4, True, dtype)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@causality
def test_batches_and_groups(heads: tuple[int, int], causal: bool) -> None:
    assert_pattern("random", TAIL, BLOCK, 0.5, causal, torch.bfloat16, heads=heads, batch=2)


@pytest.mark.parametrize("pattern", ["global-local", "sink-window"])
@causality
@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows_and_columns_are_split(dim: int, causal: bool, pattern: str) -> None:
    """One row or column sees all blocks, the others few; several programs share it."""
    assert_pattern(pattern, 4096 - 21, 16, 0.97, causal, torch.bfloat16, dim=dim)
