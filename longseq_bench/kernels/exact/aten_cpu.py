"""torch's fused attention for CPUs."""

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple, check_strides
from longseq_bench.kernels.exact._masks import bias_of, clear_empty_rows, hide_empty_rows
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel

_aten: Any = torch.ops.aten


@exact_kernel("aten-flash-cpu")
class AtenFlashCpu(ExactKernel):
    """torch's fused kernel for CPUs, also for masks."""

    device = "cpu"
    takes_masks = True

    @classmethod
    @override
    def priority(cls, use: Use) -> int | None:
        return 1

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        check_strides("torch's fused kernel", q, k, v)
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
