"""torch's fused attention: for CPUs and for CUDA (cuDNN, FlashAttention-2, efficient).

Masks are a term added to the scores. `efficient` knows float32, masks and older GPUs.
FlashAttention-2: arXiv 2307.08691.
"""

from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import (
    HALF,
    MAX_INDEX,
    capability_reason,
    half_reason,
    repeat_heads,
    round_up,
    sum_groups,
)
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel
from longseq_bench.meta_mode import is_meta

_ALIGNED_KEYS = 8
"""Elements to which the memory-efficient kernel needs each row of the term aligned."""


def bias_of(mask: Tensor, q: Tensor) -> Tensor:
    """Return a mask (Nq, Nk) as a term that is added to the scores: 0 or -inf, like q."""
    rows, keys = mask.shape
    bias = q.new_zeros(rows, -(-keys // _ALIGNED_KEYS) * _ALIGNED_KEYS)[:, :keys]
    return bias.masked_fill_(~mask.to(q.device), -torch.inf)


def clear_empty_rows(out: Tensor, lse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results with 0 and -inf in rows that see nothing.

    The kernels return another log-sum-exp there. One that is not kept may have no rows.
    """
    empty = ~mask.any(1).to(out.device)
    kept = lse.masked_fill(empty, -torch.inf) if lse.numel() else lse
    return out.masked_fill(empty[:, None], 0.0), kept


def hide_empty_rows(lse: Tensor) -> Tensor:
    """Return the log-sum-exp for a backward: rows that see nothing get weights of 0.

    Otherwise they would be exp(-inf + inf).
    """
    return lse.masked_fill(lse == -torch.inf, torch.inf)


_aten: Any = torch.ops.aten


@exact_kernel("aten-flash-cpu")
class AtenFlashCpu(ExactKernel):
    """torch's fused kernel for CPUs, also for masks."""

    device = "cpu"
    takes_masks = True
    default_priority = 1

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        bias = None if mask is None else bias_of(mask, q)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
        return (out, lse) if mask is None else clear_empty_rows(out, lse, mask)

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        bias = None
        if mask is not None:
            bias, lse = bias_of(mask, q), hide_empty_rows(lse)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
        return cast(Triple, grads)


_LSE_ALIGN = 32


@exact_kernel("efficient")
class Efficient(ExactKernel):
    """torch's memory-efficient kernel: float32, older GPUs, masks."""

    device = "cuda"
    takes_masks = takes_v_head_dim = True
    default_priority = 1

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        if use.dtype not in (*HALF, torch.float32):
            return f"it supports bfloat16, float16 and float32, not {str(use.dtype)[6:]}"
        align = 16 // use.dtype.itemsize
        if use.head_dim % align or use.v_head_dim % align:
            return f"it needs a head_dim that is a multiple of {align}"
        return super().unavailable_reason(use) or capability_reason((5, 0))

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        _check_size(q, k)
        k, v = repeat_heads(q, k), repeat_heads(q, v)
        bias = None if mask is None else _expand(bias_of(mask, q), q)
        result = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, keep_lse, 0.0, causal)
        out, lse = result[0], result[1][..., : q.shape[2]]
        return (out, lse) if mask is None else clear_empty_rows(out, lse, mask)

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        _check_size(q, k)
        bias = None
        if mask is not None:
            bias, lse = _expand(bias_of(mask, q), q), hide_empty_rows(lse)
        # it needs the log-sum-exp padded to 32 rows, and an output whose heads are next to tokens
        padded = pad(lse, (0, -q.shape[2] % _LSE_ALIGN), value=torch.inf)
        out, grad_out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (out, grad_out))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        tensors = grad_out, q, repeat_heads(q, k), repeat_heads(q, v), bias, out, padded
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *tensors, seed, seed, 0.0, [True, True, True, False], causal
        )
        return dq, sum_groups(dk, k), sum_groups(dv, v)


def _check_size(q: Tensor, k: Tensor) -> None:
    largest = max(q.shape[2], k.shape[2]) * q.shape[3]
    if largest > MAX_INDEX:
        raise KernelLimitError(
            f"efficient: {largest:,} elements of a head; its kernel indexes at most {MAX_INDEX:,}"
        )


def _expand(bias: Tensor, q: Tensor) -> Tensor:
    return bias.expand(q.shape[0], q.shape[1], *bias.shape)


def backward_elements(batch: int, heads: int, tokens: int, head_dim: int) -> int:
    """Return the elements of the float32 sums of dQ in a backward of FlashAttention-2.

    They are one buffer of a call. Beyond 2^31 elements it writes to other memory (an illegal memory
    access, or silent errors).
    """
    dims = round_up(head_dim, 32 if head_dim <= 128 else 64)
    return batch * heads * round_up(tokens, 128) * dims


@exact_kernel("flash")
class Flash(ExactKernel):
    """FlashAttention-2 as torch has it built in."""

    device = "cuda"
    default_priority = 10

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        return super().unavailable_reason(use) or half_reason(use) or capability_reason((8, 0))

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
        return out, lse

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        (batch, heads, rows, dim), kv_heads = q.shape, k.shape[1]
        group, tokens = heads // kv_heads, max(rows, k.shape[2])
        if backward_elements(batch, heads, tokens, dim) <= MAX_INDEX:
            return self._backward_call(queries, keys, causal)
        if (of_one := backward_elements(1, group, tokens, dim)) > MAX_INDEX:
            raise KernelLimitError(
                f"flash: the backward of one KV head has {of_one:,} elements; its kernel indexes "
                f"at most {MAX_INDEX:,}"
            )
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for b, kv in product(range(batch), range(kv_heads)):
            own = slice(b, b + 1), slice(kv * group, (kv + 1) * group)
            seen = slice(b, b + 1), slice(kv, kv + 1)
            of_own = grad_out[own], q[own], out[own], lse[own]
            part = self._backward_call(of_own, (k[seen], v[seen]), causal)
            for grad, at, result in zip(grads, (own, seen, seen), part, strict=True):
                grad[at] = result
        return grads

    def _backward_call(self, queries: Queries, keys: Pair, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        tensors, lengths = (grad_out, q, k, v, out, lse.contiguous()), (q.shape[2], k.shape[2])
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, *lengths, 0.0, causal, seed, seed
        )
        return grads[0], grads[1], grads[2]


NO_CUDNN = "this torch has no cuDNN; take one from pytorch.org's index for CUDA"


@exact_kernel("cudnn")
class Cudnn(ExactKernel):
    """cuDNN's fused kernel as torch has it built in."""

    device = "cuda"
    default_priority = 20

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use) or half_reason(use, largest=128)
        has_cudnn = is_meta() or torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return reason or capability_reason((8, 0)) or (None if has_cudnn else NO_CUDNN)

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse.reshape(q.shape[:3])

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        if queries[1].shape[2] == keys[0].shape[2] == 1:
            return self._backward_of_one_pair(queries, keys)
        (grad_out, q, out, lse), (k, v) = queries, keys
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read without dropout
        tensors = grad_out, q, k, v, out, lse.contiguous().unsqueeze(-1)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        )
        return grads[0], grads[1], grads[2]

    def _backward_of_one_pair(self, queries: Queries, keys: Pair) -> Triple:
        """Add a query whose gradient is zero: cuDNN refuses one query and one key in a backward."""
        grad_out, q, out = (pad(t, (0, 0, 0, 1)) for t in queries[:3])
        two = grad_out, q, out, pad(queries[3], (0, 1))
        dq, dk, dv = self._backward(two, keys, causal=False, mask=None)
        return dq[:, :, :1], dk, dv
