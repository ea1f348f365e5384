"""torch's memory-efficient kernel for CUDA: float32 and 16 bits, masks, older GPUs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.base import Pair, Queries, Triple, check_strides
from longseq_bench.kernels.exact._cuda import HALF, capability_reason, repeat_heads, sum_groups
from longseq_bench.kernels.exact._flash_backward import MAX_INDEX
from longseq_bench.kernels.exact._masks import bias_of, clear_empty_rows, hide_empty_rows
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel

_aten: Any = torch.ops.aten
_LSE_ALIGN = 32


@exact_kernel("efficient")
class Efficient(ExactKernel):
    """torch's memory-efficient kernel: float32, older GPUs, masks."""

    device = "cuda"
    takes_masks = True
    takes_v_head_dim = True

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        if use.dtype not in (*HALF, torch.float32):
            return f"it supports bfloat16, float16 and float32, not {str(use.dtype)[6:]}"
        align = 16 // use.dtype.itemsize
        if use.head_dim % align or use.v_head_dim % align:
            return f"it needs a head_dim that is a multiple of {align}"
        return super().unavailable_reason(use) or capability_reason((5, 0))

    @classmethod
    @override
    def priority(cls, use: Use) -> int | None:
        return 1

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        check_strides(self.name, q, k, v)
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
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, repeat_heads(q, k), repeat_heads(q, v), bias, out, padded, seed, seed,
            0.0, [True, True, True, False], causal,
        )  # fmt: skip
        return dq, sum_groups(dk, k), sum_groups(dv, v)


def _check_size(q: Tensor, k: Tensor) -> None:
    """Raise KernelLimitError if tokens times head_dim exceed the kernel's 32-bit offsets."""
    largest = max(q.shape[2], k.shape[2]) * q.shape[3]
    if largest > MAX_INDEX:
        raise KernelLimitError(
            f"efficient: {largest:,} elements of a head; its kernel indexes at most {MAX_INDEX:,}"
        )


def _expand(bias: Tensor, q: Tensor) -> Tensor:
    return bias.expand(q.shape[0], q.shape[1], *bias.shape)
