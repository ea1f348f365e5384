"""FlashAttention-2 as torch has it built in, for CUDA (arXiv 2307.08691)."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple, check_strides
from longseq_bench.kernels.exact._cuda import capability_reason, half_reason
from longseq_bench.kernels.exact._flash_backward import backward_in_parts
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel

_aten: Any = torch.ops.aten


@exact_kernel("flash")
class Flash(ExactKernel):
    """FlashAttention-2 as torch has it built in."""

    device = "cuda"

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        return super().unavailable_reason(use) or half_reason(use) or capability_reason((8, 0))

    @classmethod
    @override
    def priority(cls, use: Use) -> int | None:
        return 10

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        check_strides(self.name, q, k, v)
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
        return out, lse

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        return backward_in_parts(
            self.name, queries, keys, lambda rows, seen: self._backward_call(rows, seen, causal)
        )

    def _backward_call(self, queries: Queries, keys: Pair, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, causal, seed, seed,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]
