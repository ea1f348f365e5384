"""Kernels of the FlashAttention packages, with plain attention behind the packages' functions."""

import sys

import pytest
import torch

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.exact import _packages, flash_attn_4
from longseq_bench.kernels.exact.base import KERNELS, ExactKernel, Use
from longseq_bench.kernels.exact.flash_attn_4 import MAX_INDEX, FlashAttn4
from tests.kernels import plain_attention
from tests.kernels.flash_packages import PACKAGES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=PACKAGES)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ExactKernel:
    module, package = PACKAGES[request.param]
    monkeypatch.setitem(sys.modules, module, package)
    return KERNELS.get(request.param)(Use("cuda", torch.bfloat16, 16, True))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_called_as_the_package_expects(kernel: ExactKernel, causal: bool) -> None:
    grad_out, q, k, v = plain_attention.draw_grouped(33, 33)
    out, lse = kernel.forward(q, k, v, causal)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = plain_attention.forward(*leaves, causal)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    grads = kernel.backward((grad_out, q, out, lse), (k, v), causal)
    for got, want in zip(
        grads, torch.autograd.grad(expected, leaves, grad_out.double()), strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_its_backward_is_given_the_whole_softmax(kernel: ExactKernel) -> None:
    grad_out, q, k, v = plain_attention.draw_grouped(20, 50)
    out, lse, (dq, dk, dv) = plain_attention.gradients((q, k, v), grad_out)
    # a slice, as a merge makes it; the packages take contiguous ones
    sliced = torch.stack([lse.float()] * 2, -1)[..., 0]
    queries = grad_out, q, out.float(), sliced
    parts = [
        kernel.backward(queries, (k[:, :, own], v[:, :, own]))
        for own in (slice(0, 15), slice(15, 50))
    ]
    got = parts[0][0] + parts[1][0], *(torch.cat([parts[0][i], parts[1][i]], 2) for i in (1, 2))
    for one, want in zip(got, (dq, dk, dv), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "words"),
    [
        (torch.float32, 64, "it supports bfloat16 and float16, not float32"),
        (torch.bfloat16, 264, "a head_dim of at most 256"),
        (torch.bfloat16, 36, "a multiple of 8"),
    ],
)
def test_what_it_can_not_compute_is_refused(
    name: str, dtype: torch.dtype, head_dim: int, words: str
) -> None:
    reason = KERNELS.get(name).unavailable_reason(Use("cuda", dtype, head_dim, True))
    assert words in (reason or "")


@pytest.mark.parametrize(("major", "refused"), [(9, False), (10, True)])
def test_blackwell_has_fewer_head_dims(
    monkeypatch: pytest.MonkeyPatch, major: int, refused: bool
) -> None:
    monkeypatch.setattr(_packages, "version", lambda name: "4.0.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    words = {
        d: FlashAttn4.unavailable_reason(Use("cuda", torch.bfloat16, d, True))
        for d in (128, 192, 256)
    }
    assert (words[128], words[256]) == (None, None)
    found = "it needs a head_dim of at most 128, or 256, on compute capability 10.0"
    assert words[192] == (found if refused else None)


@pytest.mark.parametrize("kernel", ["flash-attn-4"], indirect=True)
def test_a_length_that_its_index_can_not_address_is_a_limit(
    kernel: ExactKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MSLK#303: from 2M tokens of 8 heads of 128 an offset overflows 32 bits."""
    assert MAX_INDEX + 1 == 2**21 * 8 * 128
    grad_out, q, k, v = plain_attention.draw_grouped(40, 40)
    out, lse = kernel.forward(q, k, v)
    monkeypatch.setattr(flash_attn_4, "MAX_INDEX", q.numel())
    kernel.forward(q, k, v)
    monkeypatch.setattr(flash_attn_4, "MAX_INDEX", q.numel() - 1)
    message = (
        "flash-attn-4: a tensor spans 5,120 elements; kernels written in CuTe index at most 5,119"
    )
    with pytest.raises(KernelLimitError, match=message):
        kernel.forward(q, k, v)
    # the sums of a backward round 40 tokens up to 128, and a head_dim of 16 up to 32
    monkeypatch.setattr(flash_attn_4, "MAX_INDEX", 2 * 4 * 128 * 32 - 1)
    with pytest.raises(KernelLimitError, match="a tensor spans 32,768 elements"):
        kernel.backward((grad_out, q, out, lse), (k, v))


@pytest.mark.parametrize("kernel", ["flash-attn-4"], indirect=True)
def test_a_view_counts_with_the_memory_between_its_elements(
    kernel: ExactKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attention#2611: a view with a large stride overflows before its size does."""
    _, q, k, v = plain_attention.draw_grouped(40, 40)
    wide = torch.zeros(2, 4, 40, 160)[..., :16].copy_(q)
    monkeypatch.setattr(flash_attn_4, "MAX_INDEX", q.numel())
    with pytest.raises(KernelLimitError, match="a tensor spans 51,056 elements"):
        kernel.forward(wide, k, v)
