"""Replacements of the FlashAttention packages: plain attention behind functions as theirs.

The signatures are those of github.com/Dao-AILab/flash-attention: version 2.8 at 0053002, versions 3
and 4 at 0251105. Version 3 registers its functions as custom operators.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.torch_kernel import EXACT


def forward_2(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Tensors (B, N, H, D); returns the output, the log-sum-exp (B, H, N) and two None."""
    assert softmax_scale == q.shape[3] ** -0.5
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
    assert (alibi_slopes, return_softmax) == (None, False)
    out, lse = EXACT.forward(*(t.transpose(1, 2) for t in (q, k, v)), causal)
    return out.transpose(1, 2).contiguous(), lse.contiguous(), None, None


def backward_2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the gradients; return the row sums of dout * out."""
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
    assert (alibi_slopes, deterministic) == (None, False)
    return _write_gradients((dout, q, k, v, out), softmax_lse, (dq, dk, dv), softmax_scale, causal)


@torch.library.custom_op("longseq_test_fa3::_flash_attn_forward", mutates_args=())
def forward_3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Tensors (B, N, H, D); returns the output, the log-sum-exp (B, H, N) and two empty tensors."""
    assert softmax_scale == q.shape[3] ** -0.5
    out, lse = EXACT.forward(*(t.transpose(1, 2) for t in (q, k, v)), causal)
    return out.transpose(1, 2).contiguous(), lse.contiguous(), q.new_empty(0), q.new_empty(0)


@torch.library.custom_op("longseq_test_fa3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None, sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Write the gradients; return the row sums of dout * out."""
    tensors = (dout, q, k, v, out)
    return _write_gradients(tensors, softmax_lse, (dq, dk, dv), softmax_scale, is_causal)


def _write_gradients(
    tensors: tuple[Tensor, ...], lse: Tensor, into: tuple[Tensor | None, ...], scale: float | None,
    causal: bool,
) -> Tensor:  # fmt: skip
    assert scale == tensors[1].shape[3] ** -0.5
    assert lse.is_contiguous()
    dout, q, k, v, out = (t.transpose(1, 2) for t in tensors)
    grads = EXACT.backward((dout, q, out, lse), (k, v), causal)
    for grad, one in zip(grads, into, strict=True):
        assert one is not None
        one.copy_(grad.transpose(1, 2))
    return dout.mul(out).sum(-1)


def forward_4(
    q: Tensor | None, k: Tensor | None, v: Tensor, qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, softcap: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
    learnable_sink: Tensor | None = None, tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None, intra_wg_overlap: bool | None = None, num_threads: int = 384,
    num_splits: int = 1, pack_gqa: bool | None = None, _arch: int | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: object | None = None, return_lse: bool = False,
    out: Tensor | None = None, lse: Tensor | None = None, aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, scheduler_metadata: object | None = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Tensors (B, N, H, D); returns the output, the log-sum-exp (B, H, N) and two None."""
    assert q is not None
    assert k is not None
    assert return_lse
    assert softmax_scale == q.shape[3] ** -0.5
    output, logsumexp = EXACT.forward(*(t.transpose(1, 2) for t in (q, k, v)), causal)
    return output.transpose(1, 2).contiguous(), logsumexp.contiguous(), None, None


def backward_4(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    softmax_scale: float | None = None, causal: bool = False, softcap: float = 0.0,
    window_size_left: int | None = None, window_size_right: int | None = None,
    m_block_size: int = 64, n_block_size: int = 128, num_threads: int = 256,
    pack_gqa: bool = False, num_stages_Q: int = 2, num_stages_dO: int = 2,
    SdP_swapAB: bool = False, dKV_swapAB: bool = False, dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2, AtomLayoutNdKV: int = 2, AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, deterministic: bool = False, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None, score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None, aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None, block_sparse_tensors: object | None = None,
    dlse: Tensor | None = None, learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k and v, (B, N, H, D)."""
    assert softmax_scale == q.shape[3] ** -0.5
    assert lse.is_contiguous()
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    grads = EXACT.backward((dout, q, out, lse), (k, v), causal)
    return tuple(grad.transpose(1, 2).contiguous() for grad in grads)


PACKAGES: dict[str, tuple[str, SimpleNamespace]] = {
    "flash-attn-2": (
        "flash_attn.flash_attn_interface",
        SimpleNamespace(_flash_attn_forward=forward_2, _flash_attn_backward=backward_2),
    ),
    "flash-attn-3": (
        "flash_attn_interface",
        SimpleNamespace(_flash_attn_forward=forward_3, _flash_attn_backward=backward_3),
    ),
    "flash-attn-4": (
        "flash_attn.cute.interface",
        SimpleNamespace(_flash_attn_fwd=forward_4, _flash_attn_bwd=backward_4),
    ),
}
"""By kernel: the name of the module, and its replacement."""
