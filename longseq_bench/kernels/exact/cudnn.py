"""cuDNN's fused attention as torch has it built in, for CUDA."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple, check_strides
from longseq_bench.kernels.exact._cuda import capability_reason, half_reason
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel
from longseq_bench.meta_mode import is_meta

_aten: Any = torch.ops.aten


@exact_kernel("cudnn")
class Cudnn(ExactKernel):
    """cuDNN's fused kernel as torch has it built in."""

    device = "cuda"

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use) or half_reason(use, largest=128)
        if reason := reason or capability_reason((8, 0)):
            return reason
        has_cudnn = is_meta() or torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return None if has_cudnn else "this torch has no cuDNN"

    @classmethod
    @override
    def priority(cls, use: Use) -> int | None:
        # faster than flash from Hopper on; before it, flash is
        return 20 if capability_reason((9, 0)) is None else 5

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        check_strides(self.name, q, k, v)
        out, lse = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse.reshape(q.shape[:3])

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        if queries[1].shape[2] == keys[0].shape[2] == 1:
            return self._backward_of_one_pair(queries, keys)
        (grad_out, q, out, lse), (k, v) = queries, keys
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]

    def _backward_of_one_pair(self, queries: Queries, keys: Pair) -> Triple:
        """Add a query whose gradient is zero: cuDNN refuses one query and one key in a backward."""
        grad_out, q, out = (pad(t, (0, 0, 0, 1)) for t in queries[:3])
        two = grad_out, q, out, pad(queries[3], (0, 1))
        dq, dk, dv = self._backward(two, keys, causal=False, mask=None)
        return dq[:, :, :1], dk, dv
