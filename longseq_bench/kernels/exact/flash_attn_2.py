"""The flash-attn package, version 2, for CUDA (arXiv 2307.08691)."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import capability_reason, half_reason
from longseq_bench.kernels.exact._flash_backward import backward_in_parts
from longseq_bench.kernels.exact._flash_buffers import allocate_flash_2
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel
from longseq_bench.meta_mode import is_meta

PACKAGE = Package(
    distribution="flash-attn",
    module="flash_attn.flash_attn_interface",
    install="pip install flash-attn --no-build-isolation",
    parameters={
        "_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left "
        "window_size_right softcap alibi_slopes return_softmax",
        "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale "
        "causal window_size_left window_size_right softcap alibi_slopes deterministic",
    },
)


@exact_kernel("flash-attn-2")
class FlashAttn2(ExactKernel):
    """The flash-attn package, version 2."""

    device = "cuda"
    optional = True

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use) or half_reason(use)
        # a plan is made for packages that this machine lacks
        missing = None if is_meta() else PACKAGE.unavailable_reason()
        return reason or missing or capability_reason((8, 0))

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        if is_meta():
            return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        tensors = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *_ = _package()._flash_attn_forward(
            *tensors, dropout_p=0.0, softmax_scale=q.shape[3] ** -0.5, causal=causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
            return_softmax=False,
        )  # fmt: skip
        return out.transpose(1, 2), lse

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        return backward_in_parts(
            self.name, queries, keys, lambda rows, seen: _backward_call(rows, seen, causal)
        )


def _backward_call(queries: Queries, keys: Pair, causal: bool) -> Triple:
    (grad_out, q, out, lse), (k, v) = queries, keys
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    if is_meta():
        allocate_flash_2(q, k)
        return dq, dk, dv
    tensors = (t.transpose(1, 2) for t in (grad_out, q, k, v, out))
    gradients = (t.transpose(1, 2) for t in (dq, dk, dv))
    _package()._flash_attn_backward(
        *tensors, lse.contiguous(), *gradients, dropout_p=0.0,
        softmax_scale=q.shape[3] ** -0.5, causal=causal, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return dq, dk, dv


@cache
def _package() -> Any:
    return PACKAGE.load()
