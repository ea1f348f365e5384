"""The flash-attn package, version 2, for CUDA (arXiv 2307.08691)."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import capability_reason
from longseq_bench.kernels.exact._flash_backward import backward_in_parts
from longseq_bench.kernels.exact._flash_buffers import allocate_flash_2
from longseq_bench.kernels.exact._package_kernel import PackageKernel, transpose
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import Use, exact_kernel

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
class FlashAttn2(PackageKernel):
    """The flash-attn package, version 2."""

    package = PACKAGE

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        return super().unavailable_reason(use) or capability_reason((8, 0))

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        whole = super()._backward
        return backward_in_parts(
            self.name, queries, keys, lambda rows, seen: whole(rows, seen, causal, mask)
        )

    @override
    def _call_forward(self, **given: Any) -> Any:
        return self._module._flash_attn_forward(
            **given, dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0,
            alibi_slopes=None, return_softmax=False,
        )  # fmt: skip

    @override
    def _call_backward(self, queries: Queries, keys: Pair, scale: float, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        self._module._flash_attn_backward(
            **transpose(dout=grad_out, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv),
            softmax_lse=lse.contiguous(), dropout_p=0.0, softmax_scale=scale, causal=causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
            deterministic=False,
        )  # fmt: skip
        return dq, dk, dv

    @override
    def _allocate_buffers(self, q: Tensor, k: Tensor) -> None:
        allocate_flash_2(q, k)
