"""FlexAttention as a kernel of exact attention: its backward for a part of a larger softmax.

A plain, differentiable attention stands for FlexAttention, so float64 shows the formula without
rounding. What the compiled kernel returns on a GPU is in the contract test, test_exact.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.kernels import flex_blocks
from longseq_bench.kernels.exact.base import KERNELS, Use
from longseq_bench.kernels.exact.flex import Flex
from tests.kernels import plain_attention

pytestmark = pytest.mark.usefixtures("one_thread")

KERNEL = Flex(Use("cuda", torch.float64, 16, True))


def stand_in(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, **options: Any) -> Any:
    """Return what FlexAttention returns for no mask or for the causal block mask."""
    causal = block_mask is not None
    if causal:
        assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
        assert block_mask.mask_mod is flex_blocks.causal_mask_mod
        assert (block_mask.q_indices is not None) == torch.is_grad_enabled()
    assert options["return_aux"].lse
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = plain_attention.forward(q.to(wide), k.to(wide), v.to(wide), causal)
    return out.to(q.dtype), SimpleNamespace(lse=lse)


@pytest.fixture(autouse=True)
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in for FlexAttention."""
    monkeypatch.setattr(flex_blocks, "attend", stand_in)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradients_of_its_own_softmax(causal: bool) -> None:
    grad_out, q, k, v = plain_attention.draw_grouped(70, 70, torch.float64)
    out, lse = KERNEL.forward(q, k, v, causal)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = plain_attention.forward(*leaves, causal)
    assert not out.requires_grad
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    grads = KERNEL.backward((grad_out, q, out, lse), (k, v), causal)
    for got, want in zip(grads, torch.autograd.grad(expected, leaves, grad_out), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_a_causal_part_of_a_larger_softmax() -> None:
    """As in a ring: 35 earlier keys for all queries, and the triangle of the rank's own.

    Large scores, so that the parts have very different weights; exact to float64's rounding.
    """
    grad_out, q, k, v = plain_attention.draw_grouped(35, 70, torch.float64)
    k[:, :, 20:40] *= 8
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    seen = torch.cat([torch.ones(35, 35), torch.ones(35, 35).tril()], 1)
    out, lse = plain_attention.forward(*leaves, counts=seen)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    queries = grad_out, q, out.detach(), lse.detach()
    early = KERNEL.backward(queries, (k[:, :, :35], v[:, :, :35]))
    late = KERNEL.backward(queries, (k[:, :, 35:], v[:, :, 35:]), causal=True)
    got = early[0] + late[0], *(torch.cat([early[i], late[i]], 2) for i in (1, 2))
    for one, want in zip(got, (dq, dk, dv), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "words"),
    [
        (torch.float64, 64, "it supports bfloat16, float16 and float32, not float64"),
        (torch.float32, 8, "it needs a head_dim of at least 16"),
    ],
)
def test_what_it_can_not_compute_is_refused(dtype: torch.dtype, head_dim: int, words: str) -> None:
    reason = KERNELS.get("flex").unavailable_reason(Use("cuda", dtype, head_dim, True))
    assert words in (reason or "")


def test_it_is_for_cuda_and_never_chosen_by_auto() -> None:
    assert Flex.priority(Use("cuda", torch.bfloat16, 64, True)) is None
    reason = Flex.unavailable_reason(Use("cpu", torch.float32, 64, False))
    assert reason == "it runs on cuda only"
