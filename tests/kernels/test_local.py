"""The fused kernels beside their plain twin: output, log-sum-exp, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longseq_bench.kernels import local, plain

SHAPES = [(1, 4, 4, 1, 1), (2, 4, 2, 7, 7), (1, 6, 2, 130, 130), (2, 2, 1, 5, 67), (1, 4, 2, 67, 5)]
"""B, Hq, Hk, Nq, Nk."""

CAUSAL = [shape for shape in SHAPES if shape[3] == shape[4]]
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-9}

Shape = tuple[int, int, int, int, int]


pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    B, Hq, Hk, Nq, Nk = shape
    draw = torch.Generator().manual_seed(0)
    sizes = ((B, Hq, Nq, 16), (B, Hk, Nk, 16), (B, Hk, Nk, 16))
    return [torch.randn(size, generator=draw).to(dtype) for size in sizes]


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    got, want = got.detach(), want.detach()
    scale = max(float(want.abs().max()), 0.5)
    assert float((got.double() - want.double()).abs().max()) < ALLOWED[dtype] * scale


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(
    ("shape", "causal"), [*((s, False) for s in SHAPES), *((s, True) for s in CAUSAL)]
)
def test_forward_equals_the_plain_twin(shape: Shape, causal: bool, dtype: torch.dtype) -> None:
    tensors = inputs(shape, dtype)
    out, lse = local.forward(*tensors, causal)
    want, want_lse = plain.forward(*(t.double() for t in tensors), causal)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype.itemsize == 8 else torch.float)
    assert lse.shape == out.shape[:3]
    assert_near(out, want, dtype)
    assert_near(lse, want_lse, dtype)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(
    ("shape", "causal"), [*((s, False) for s in SHAPES), *((s, True) for s in CAUSAL)]
)
def test_backward_equals_the_plain_twin(shape: Shape, causal: bool, dtype: torch.dtype) -> None:
    tensors = inputs(shape, dtype)
    out, lse = local.forward(*tensors, causal)
    grad_out = torch.randn_like(out)
    leaves = [t.double().requires_grad_() for t in tensors]
    want, _ = plain.forward(*leaves, causal)
    wanted = torch.autograd.grad(want, leaves, grad_out.double())
    for got, grad in zip(local.backward(grad_out, *tensors, out, lse, causal), wanted, strict=True):
        assert got.shape == grad.shape
        assert_near(got, grad, dtype)


def test_backward_gives_a_part_of_a_larger_softmax() -> None:
    """Output and log-sum-exp may be those of all keys while the keys are some of them."""
    q, k, v = inputs((1, 2, 2, 40, 90))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = plain.forward(*leaves)
    grad_out = torch.randn_like(q)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out.double())
    out, lse = out.detach().float(), lse.detach().float()
    parts = [
        local.backward(grad_out, q, k[:, :, own], v[:, :, own], out, lse)
        for own in (slice(0, 30), slice(30, 90))
    ]
    assert_near(parts[0][0] + parts[1][0], dq, torch.float32)
    assert_near(torch.cat([parts[0][1], parts[1][1]], 2), dk, torch.float32)
    assert_near(torch.cat([parts[0][2], parts[1][2]], 2), dv, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_strided_tokens_and_heads_equal_their_copies(causal: bool) -> None:
    """Tiles hand over views: every third token, every second head, heads beside tokens."""
    whole = inputs((1, 8, 8, 90, 90))
    views = [t[:, 1::2, 2::3] for t in whole]
    views[2] = views[2].transpose(1, 2).contiguous().transpose(1, 2)
    copies = [t.contiguous() for t in views]
    out, lse = local.forward(*views, causal)
    want, want_lse = local.forward(*copies, causal)
    assert torch.equal(lse, want_lse)
    assert torch.equal(out, want)
    grad_out = torch.randn(1, 30, 4, 16).transpose(1, 2)
    grads = local.backward(grad_out, *views, out, lse, causal)
    wanted = local.backward(grad_out.contiguous(), *copies, want, want_lse, causal)
    for got, grad in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-6, atol=1e-7)


def test_plain_is_what_torch_computes() -> None:
    """The twin itself is held against another hand's attention."""
    q, k, v = (t.double() for t in inputs((2, 4, 2, 33, 33)))
    for causal in (False, True):
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )
        torch.testing.assert_close(plain.forward(q, k, v, causal)[0], want)


def test_the_kernel_has_a_name() -> None:
    assert local.name("cpu", torch.bfloat16) == "flash (CPU)"
    assert local.name("cuda", torch.float16) == "flash"
    assert local.name("cuda", torch.float32) == "efficient"
