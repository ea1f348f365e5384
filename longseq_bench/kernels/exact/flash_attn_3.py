"""FlashAttention-3, a package for Hopper GPUs (arXiv 2407.08608).

Its functions are called directly. torch can put it behind its own operators instead, but for the
whole process: a dense baseline by `flash` would run it too, under another name.
"""

from typing import Any

import torch
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import generation_reason
from longseq_bench.kernels.exact._package_kernel import PackageKernel, transpose
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import Use, exact_kernel

PACKAGE = Package(
    distribution="flash_attn_3",
    module="flash_attn_interface",
    install="pip install --no-build-isolation "
    '"git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
    parameters={
        "_flash_attn_forward": "q k v softmax_scale causal",
        "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv softmax_scale is_causal",
    },
)


@exact_kernel("flash-attn-3")
class FlashAttn3(PackageKernel):
    """FlashAttention-3, a package for Hopper GPUs."""

    package = PACKAGE

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        return super().unavailable_reason(use) or generation_reason((9,))

    @override
    def _call_forward(self, **given: Any) -> Any:
        return self._module._flash_attn_forward(**given)

    @override
    def _call_backward(self, queries: Queries, keys: Pair, scale: float, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        self._module._flash_attn_backward(
            **transpose(dout=grad_out, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv),
            softmax_lse=lse.contiguous(), softmax_scale=scale, is_causal=causal,
        )  # fmt: skip
        return dq, dk, dv
