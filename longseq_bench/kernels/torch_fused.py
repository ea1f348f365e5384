"""torch's fused attention kernels on one device, forward and backward, with the log-sum-exp.

Merging needs the log-sum-exp. As in FlashAttention (arXiv 2205.14135) the backward needs only the
output and the log-sum-exp. Both may belong to a larger softmax of which these keys are a part; the
gradients are then this part's contribution.

Shapes: q (B, Hq, Nq, D); k, v (B, Hk, Nk, D), Hk divides Hq; log-sum-exp (B, Hq, Nq), float32
(float64 for float64). `causal` means the lower triangle and needs Nq == Nk.
"""

from typing import Any, cast

import torch
from torch import Tensor

from longseq_bench.kernels.base import OutputAndLse, Pair, Queries, Triple, check_strides
from longseq_bench.meta_mode import device_kind, refuse_limited_loops

_aten: Any = torch.ops.aten
_EFFICIENT_ALIGN = 32
_HALF = (torch.bfloat16, torch.float16)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    mask: Tensor | None = None,
    keep_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, Hq, Nq, D) and log-sum-exp (B, Hq, Nq).

    mask: (Nq, Nk), True where a query sees a key. Rows that see nothing get 0 and -inf.
    keep_lse: False if the log-sum-exp is not needed; it may be empty then.
    """
    check_strides("torch's fused kernel", q, k, v)
    bias = None if mask is None else _bias(mask, q)
    if device_kind(q) == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
    elif q.dtype in _HALF and bias is None:
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        k, v = _repeat_heads(q, k), _repeat_heads(q, v)
        result = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, keep_lse, 0.0, causal)
        out, lse = result[0], result[1][..., : q.shape[2]]
    if mask is not None:
        # the kernels return another log-sum-exp for rows that see nothing
        empty_rows = ~mask.any(1).to(lse.device)
        out = out.masked_fill(empty_rows[:, None], 0.0)
        lse = lse.masked_fill(empty_rows, -torch.inf)
    return out, lse


def backward(
    queries: Queries, keys: Pair, causal: bool = False, mask: Tensor | None = None
) -> Triple:
    """Return the gradients of q, k, v, given the output and log-sum-exp of the whole softmax."""
    (grad_out, q, out, lse), (k, v) = queries, keys
    bias = None
    if mask is not None:
        # a row that sees nothing then has weights of 0 instead of exp(-inf + inf)
        bias, lse = _bias(mask, q), lse.masked_fill(lse == -torch.inf, torch.inf)
    if device_kind(q) == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
        return cast(Triple, grads)
    if q.dtype in _HALF and bias is None:
        seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, causal, seed, seed,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]
    # the memory-efficient kernel needs repeated KV heads, and a log-sum-exp padded to 32 rows
    short = -q.shape[2] % _EFFICIENT_ALIGN
    padded = torch.nn.functional.pad(lse, (0, short), value=torch.inf)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, _repeat_heads(q, k), _repeat_heads(q, v), bias, out, padded, seed, seed,
        0.0, [True, True, True, False], causal,
    )  # fmt: skip
    groups = (k.shape[0], k.shape[1], q.shape[1] // k.shape[1], k.shape[2], k.shape[3])
    return dq, dk.reshape(groups).sum(2), dv.reshape(groups).sum(2)


class FusedKernel:
    """An AttentionKernel of one call: every query sees every key, or (causal) those before it."""

    def __init__(self, causal: bool) -> None:
        self._causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and the log-sum-exp."""
        refuse_limited_loops()
        return forward(q, k, v, self._causal)

    def backward(self, queries: Queries, keys: Pair) -> Triple:
        """Return the gradients of q, k and v."""
        return backward(queries, keys, self._causal)


def name(device: str, dtype: torch.dtype) -> str:
    """Return the name of the kernel that `forward` calls for such tensors."""
    if device == "cpu":
        return "flash (CPU)"
    return "flash" if dtype in _HALF else "efficient"


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    """Return a mask as a term added to the scores, (B, Hq, Nq, Nk) with strides of 0, like q.

    Rows are aligned to 8 elements, as the memory-efficient kernel requires.
    """
    rows, keys = mask.shape
    bias = q.new_zeros(rows, -(-keys // 8) * 8)[:, :keys]
    bias.masked_fill_(~mask.to(q.device), -torch.inf)
    if device_kind(q) == "cpu":
        return bias
    return bias.expand(q.shape[0], q.shape[1], rows, keys)


def _repeat_heads(q: Tensor, k: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    return k if repeat == 1 else k.repeat_interleave(repeat, 1)
