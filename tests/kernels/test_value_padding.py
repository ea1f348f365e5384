"""Kernels of exact attention with a v_head_dim that is not the head_dim."""

import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels.exact.base import KERNELS, ExactKernel, Use, select
from tests.kernels import plain_attention
from tests.kernels.test_exact import NAMES, assert_near, gradient_like, narrow

D, DV = 24, 16

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=NAMES)
def kernel(request: pytest.FixtureRequest) -> ExactKernel:
    """Return each kernel that can run here; skip the others."""
    kind = KERNELS.get(request.param)
    use = Use(kind.device, narrow(request.param), D, True, v_head_dim=DV)
    if reason := kind.unavailable_reason(use):
        pytest.skip(reason)
    return select(request.param, use)[0]


def inputs(kernel: ExactKernel, queries: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 4, queries, D), (2, 2, keys, D), (2, 2, keys, DV)
    return [
        torch.randn(size, generator=generator).to(kernel.device, kernel.use.dtype) for size in sizes
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradients_equal_the_reference(kernel: ExactKernel, causal: bool) -> None:
    q, k, v = tensors = inputs(kernel, 67, 67)
    out, lse = kernel.forward(q, k, v, causal)
    leaves = [t.double().requires_grad_() for t in tensors]
    expected, expected_lse = plain_attention.forward(*leaves, causal)
    assert (out.shape, out.is_contiguous()) == (expected.shape, True)
    assert_near(out, expected, q.dtype)
    assert_near(lse, expected_lse, q.dtype)
    grad_out = gradient_like(out)
    grads = kernel.backward((grad_out, q, out, lse), (k, v), causal)
    for got, grad in zip(
        grads, torch.autograd.grad(expected, leaves, grad_out.double()), strict=True
    ):
        assert got.shape == grad.shape
        assert_near(got, grad, q.dtype)
    assert kernel.calls == {"forward": 1, "backward": 1}


def test_merged_parts_equal_one_softmax(kernel: ExactKernel) -> None:
    q, k, v = tensors = inputs(kernel, 40, 90)
    grad_out = gradient_like(q[..., :DV])
    expected, expected_lse, expected_grads = plain_attention.gradients(tensors, grad_out)
    out = torch.zeros(expected.shape, dtype=torch.float32, device=q.device)
    lse = torch.full_like(expected_lse, -torch.inf).float()
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in tensors)
    parts = slice(0, 30), slice(30, 90)
    for own in parts:
        kernel.merge(q, k[:, :, own], v[:, :, own], out, lse)
    queries = grad_out, q, out.to(q.dtype), lse
    for own in parts:
        d_keys = dk[:, :, own], dv[:, :, own]
        kernel.add_gradients(queries, (k[:, :, own], v[:, :, own]), dq, d_keys)
    assert_near(out, expected, q.dtype)
    for got, grad in zip((dq, dk, dv), expected_grads, strict=True):
        assert_near(got, grad, q.dtype)
    assert kernel.calls == {"forward": 2, "backward": 2}


def test_a_masked_call_is_padded_by_the_kernel_that_runs_it() -> None:
    kernel = select("auto", Use("cpu", torch.float32, D, True, v_head_dim=DV))[0]
    q, k, v = tensors = inputs(kernel, 40, 90)
    mask = torch.rand(40, 90, generator=torch.Generator().manual_seed(2)) < 0.5
    out = kernel.forward(q, k, v, mask=mask)[0]
    expected = plain_attention.forward(*(t.double() for t in tensors), counts=mask.float())[0]
    assert_near(out, expected, q.dtype)


def test_a_padding_is_a_fact_of_the_record() -> None:
    use = Use("cpu", torch.float32, 192, True, v_head_dim=128)
    words = "from 128 to 192 elements per head, in the kernel"
    for requested in ("auto", "aten-flash-cpu"):
        assert select(requested, use)[1]["padded_v"] == words
    assert "padded_v" not in select("auto", Use("cpu", torch.float32, 192, True, v_head_dim=192))[1]


def test_a_v_head_dim_above_head_dim_is_refused_with_the_reason() -> None:
    use = Use("cpu", torch.float32, 64, True, v_head_dim=96)
    for requested in ("auto", "aten-flash-cpu"):
        with pytest.raises(UnsupportedError, match="it needs a v_head_dim of at most 64"):
            select(requested, use)
