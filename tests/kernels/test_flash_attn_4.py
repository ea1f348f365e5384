"""FlashAttention-4 as a kernel: the package is replaced by plain attention behind its functions.

The signatures are those of flash_attn/cute in github.com/Dao-AILab/flash-attention at 0251105.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.exact import _packages, flash_attn_4
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.exact.flash_attn_4 import MAX_INDEX, FlashAttn4
from tests.kernels import plain_attention
from tests.kernels.torch_kernel import EXACT

pytestmark = pytest.mark.usefixtures("one_thread")


def flash_attn_fwd(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: object | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: object | None = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """Tensors (B, N, H, D); returns the output, the log-sum-exp (B, H, N) and two None."""
    assert q is not None
    assert k is not None
    assert return_lse
    assert softmax_scale == q.shape[3] ** -0.5
    output, logsumexp = EXACT.forward(*(t.transpose(1, 2) for t in (q, k, v)), causal)
    return output.transpose(1, 2).contiguous(), logsumexp.contiguous(), None, None


def flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: object | None = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, (B, N, H, D)."""
    assert softmax_scale == q.shape[3] ** -0.5
    assert lse.is_contiguous()
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    grads = EXACT.backward((dout, q, out, lse), (k, v), causal)
    return tuple(grad.transpose(1, 2).contiguous() for grad in grads)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FlashAttn4:
    package = SimpleNamespace(_flash_attn_fwd=flash_attn_fwd, _flash_attn_bwd=flash_attn_bwd)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    return FlashAttn4(Use("cuda", torch.bfloat16, 16, True))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_called_as_the_package_expects(kernel: FlashAttn4, causal: bool) -> None:
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


def test_its_backward_is_given_the_whole_softmax(kernel: FlashAttn4) -> None:
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
    assert words in (FlashAttn4.unavailable_reason(Use("cuda", dtype, head_dim, True)) or "")


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


def test_a_length_that_its_index_can_not_address_is_a_limit(
    kernel: FlashAttn4, monkeypatch: pytest.MonkeyPatch
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


def test_a_view_counts_with_the_memory_between_its_elements(
    kernel: FlashAttn4, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attention#2611: a view with a large stride overflows before its size does."""
    _, q, k, v = plain_attention.draw_grouped(40, 40)
    wide = torch.zeros(2, 4, 40, 160)[..., :16].copy_(q)
    monkeypatch.setattr(flash_attn_4, "MAX_INDEX", q.numel())
    with pytest.raises(KernelLimitError, match="a tensor spans 51,056 elements"):
        kernel.forward(wide, k, v)
