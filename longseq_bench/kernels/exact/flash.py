"""FlashAttention-2 as torch has it built in, for CUDA (arXiv 2307.08691)."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.base import Pair, Queries, Triple, check_strides
from longseq_bench.kernels.exact._cuda import capability_reason, half_reason
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel

_aten: Any = torch.ops.aten

MAX_INDEX = 2**31 - 1
"""The backward of FlashAttention-2 indexes its float32 sums of dQ with 32 bits."""


def backward_elements(batch: int, heads: int, tokens: int, head_dim: int) -> int:
    """Return the elements of the backward's largest buffer."""
    return batch * heads * (-(-tokens // 128) * 128) * max(head_dim, 32)


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
        parts = self._heads_per_call(queries[1], keys[0])
        if parts == keys[0].shape[1]:
            return self._backward_call(queries, keys, causal)
        return self._backward_by_heads(queries, keys, causal, parts)

    def _heads_per_call(self, q: Tensor, k: Tensor) -> int:
        """Return the KV heads of one backward call, so that its buffers can be indexed.

        Raises KernelLimitError if not even one KV head fits.
        """
        group = q.shape[1] // k.shape[1]
        of_one = backward_elements(q.shape[0], group, max(q.shape[2], k.shape[2]), q.shape[3])
        if of_one > MAX_INDEX:
            raise KernelLimitError(
                f"{self.name}: the backward of one KV head has {of_one:,} elements; its kernel "
                f"indexes at most {MAX_INDEX:,}"
            )
        return min(k.shape[1], MAX_INDEX // of_one)

    def _backward_by_heads(
        self, queries: Queries, keys: Pair, causal: bool, kv_heads: int
    ) -> Triple:
        grad_out, q, out, lse = queries
        group = q.shape[1] // keys[0].shape[1]
        grads = torch.empty_like(q), torch.empty_like(keys[0]), torch.empty_like(keys[1])
        for start in range(0, keys[0].shape[1], kv_heads):
            kv = slice(start, start + kv_heads)
            heads = slice(kv.start * group, kv.stop * group)
            part = self._backward_call(
                (grad_out[:, heads], q[:, heads], out[:, heads], lse[:, heads]),
                (keys[0][:, kv], keys[1][:, kv]), causal,
            )  # fmt: skip
            for total, own, of in zip(grads, part, (heads, kv, kv), strict=True):
                total[:, of] = own
        return grads

    def _backward_call(self, queries: Queries, keys: Pair, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, causal, seed, seed,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]
