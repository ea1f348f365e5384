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
MORE_THAN_32_BITS = 2**31 + 2**20


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


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_head_may_have_another_layout(dim: int, causal: bool) -> None:
    names = ["local-window", "random", "strided", "dilated-sparse"]
    layouts = [make_layout(p, TAIL, BLOCK, 0.3 + 0.1 * i, causal) for i, p in enumerate(names)]
    assert_right(layouts, *on_device(TAIL, torch.bfloat16, (4, 2), dim))


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


def test_two_runs_give_the_same_bits() -> None:
    """No sum depends on the order in which programs run."""
    layout = make_layout("global-local", 4096, 16, 0.97, False, special=16)
    assert WorkItems.of_rows([layout], torch.device("cpu")).slots
    tensors, grad_out = on_device(4096, torch.bfloat16, (4, 2))
    one, two = run([layout], tensors, grad_out), run([layout], tensors, grad_out)
    assert torch.equal(one.out, two.out)
    for first, second in zip(one.grads, two.grads, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("axis", ["heads", "tokens"])
def test_strides_above_32_bits_equal_their_copies(axis: str) -> None:
    """The last head, or the last token, begins beyond what 32 bits can address."""
    tokens = BLOCK + 21
    stride = MORE_THAN_32_BITS // (tokens - 1) // 16 * 16 + 16
    strides = (1, MORE_THAN_32_BITS, 64, 1) if axis == "heads" else (1, 64, stride, 1)
    layout = make_layout("random", tokens, BLOCK, 0.0, True)
    tensors, grad_out = on_device(tokens, torch.bfloat16, (2, 2))
    last = MORE_THAN_32_BITS + 64 * tokens if axis == "heads" else stride * (tokens - 1)
    storage = torch.empty(last + 2**16, dtype=torch.bfloat16, device="cuda")
    views = []
    for i, t in enumerate((*tensors, grad_out)):
        # with tokens far apart the tensors lie between each other's rows
        offset = i * 2**14 if axis == "heads" else i * 2 * 64
        view = storage.as_strided(t.shape, strides, offset)
        view.copy_(t)
        views.append(view)
    got, expected = run([layout], views[:3], views[3]), run([layout], tensors, grad_out)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)
    for own, other in zip(got.grads, expected.grads, strict=True):
        assert torch.equal(own, other)
