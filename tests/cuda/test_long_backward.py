"""The backward of FlashAttention-2 on both sides of the size that its 32-bit index can address."""

import pytest
import torch
from torch import Tensor

from longseq_bench.kernels.exact.base import Use, select
from longseq_bench.kernels.exact.torch_fused import MAX_INDEX, backward_elements
from tests.kernels import plain_attention
from tests.kernels.plain_attention import assert_near

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

BATCH, HEADS, GROUP, DIM = 1, 2048, 8, 256
BELOW, ABOVE = 4095, 4097
"""Tokens. With 4,096 the elements are 2^31, one more than the largest index."""


@pytest.mark.parametrize(
    ("heads", "tokens"), [(HEADS - GROUP, BELOW), (HEADS, ABOVE)], ids=["below", "above"]
)
def test_gradients_are_right_on_both_sides(heads: int, tokens: int) -> None:
    """Without a split the upper one is an illegal memory access. The last heads are checked."""
    is_beyond = backward_elements(BATCH, heads, tokens, DIM) > MAX_INDEX
    assert is_beyond == (tokens == ABOVE)
    free, _ = torch.cuda.mem_get_info()
    if free < 48 * 2**30:
        pytest.skip("needs 48 GiB of free device memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> Tensor:
        shape = (BATCH, count, tokens, DIM)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(heads), draw(heads // GROUP), draw(heads // GROUP)
    kernel = select("flash", Use("cuda", torch.bfloat16, DIM, True))[0]
    out, lse = kernel.forward(q, k, v, True)
    grad_out = draw(heads)
    grads = kernel.backward((grad_out, q, out, lse), (k, v), True)
    last, last_kv = slice(heads - GROUP, heads), slice(heads // GROUP - 1, heads // GROUP)
    tensors = q[:, last], k[:, last_kv], v[:, last_kv]
    lower = torch.ones(tokens, tokens).tril()
    _, _, expected = plain_attention.gradients(tensors, grad_out[:, last], lower)
    own = grads[0][:, last], grads[1][:, last_kv], grads[2][:, last_kv]
    for got, grad in zip(own, expected, strict=True):
        assert_near(got, grad, torch.bfloat16)
