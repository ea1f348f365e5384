"""FlashAttention-3 as a kernel: the package is replaced by plain attention behind its operators.

The signatures are those of github.com/Dao-AILab/flash-attention at 0251105, which registers its
functions as custom operators.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.exact.flash_attn_3 import FlashAttn3
from tests.kernels import plain_attention
from tests.kernels.torch_kernel import EXACT

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.library.custom_op("longseq_test_fa3::_flash_attn_forward", mutates_args=())
def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors (B, N, H, D); returns the output, the log-sum-exp (B, H, N) and two empty tensors."""
    assert softmax_scale == q.shape[3] ** -0.5
    out, lse = EXACT.forward(*(t.transpose(1, 2) for t in (q, k, v)), causal)
    return out.transpose(1, 2).contiguous(), lse.contiguous(), q.new_empty(0), q.new_empty(0)


@torch.library.custom_op("longseq_test_fa3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Write the gradients; return the row sums of dout * out."""
    assert softmax_scale == q.shape[3] ** -0.5
    assert softmax_lse.is_contiguous()
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    grads = EXACT.backward((dout, q, out, softmax_lse), (k, v), is_causal)
    for grad, into in zip(grads, (dq, dk, dv), strict=True):
        assert into is not None
        into.copy_(grad.transpose(1, 2))
    return dout.mul(out).sum(-1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FlashAttn3:
    package = SimpleNamespace(
        _flash_attn_forward=flash_attn_forward, _flash_attn_backward=flash_attn_backward
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    return FlashAttn3(Use("cuda", torch.bfloat16, 16, True))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_called_as_the_package_expects(kernel: FlashAttn3, causal: bool) -> None:
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


def test_its_backward_is_given_the_whole_softmax(kernel: FlashAttn3) -> None:
    grad_out, q, k, v = plain_attention.draw_grouped(20, 50)
    out, lse, (dq, dk, dv) = plain_attention.gradients((q, k, v), grad_out)
    queries = grad_out, q, out.float(), lse.float()
    parts = [
        kernel.backward(queries, (k[:, :, own], v[:, :, own]))
        for own in (slice(0, 15), slice(15, 50))
    ]
    got = parts[0][0] + parts[1][0], *(torch.cat([parts[0][i], parts[1][i]], 2) for i in (1, 2))
    for one, want in zip(got, (dq, dk, dv), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "words"),
    [
        (torch.float32, 64, "it supports bfloat16 and float16, not float32"),
        (torch.bfloat16, 264, "a head_dim of at most 256"),
        (torch.bfloat16, 36, "a multiple of 8"),
    ],
)
def test_what_it_can_not_compute_is_refused(dtype: torch.dtype, head_dim: int, words: str) -> None:
    assert words in (FlashAttn3.unavailable_reason(Use("cuda", dtype, head_dim, True)) or "")
