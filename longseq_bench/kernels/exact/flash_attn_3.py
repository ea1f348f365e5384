"""FlashAttention-3, a package for Hopper GPUs (arXiv 2407.08608).

Its functions are called directly. torch can put it behind its own operators instead, but for the
whole process: a dense baseline by `flash` would run it too, under another name.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import generation_reason, half_reason
from longseq_bench.kernels.exact._flash_buffers import allocate_flash_3_and_4
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import ExactKernel, Use, exact_kernel
from longseq_bench.meta_mode import is_meta

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
class FlashAttn3(ExactKernel):
    """FlashAttention-3, a package for Hopper GPUs."""

    device = "cuda"
    optional = True

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        self._package: Any = None if is_meta() else PACKAGE.load()

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use) or half_reason(use)
        # a plan is made for packages that this machine lacks
        missing = None if is_meta() else PACKAGE.unavailable_reason()
        return reason or missing or generation_reason((9,))

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        if is_meta():
            return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        tensors = {name: t.transpose(1, 2) for name, t in zip("qkv", (q, k, v), strict=True)}
        out, lse, *_ = self._package._flash_attn_forward(
            **tensors, softmax_scale=q.shape[3] ** -0.5, causal=causal
        )
        return out.transpose(1, 2), lse

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        if is_meta():
            allocate_flash_3_and_4(q, k)
            return dq, dk, dv
        tensors = {
            "dout": grad_out, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv,
        }  # fmt: skip
        self._package._flash_attn_backward(
            **{name: t.transpose(1, 2) for name, t in tensors.items()},
            softmax_lse=lse.contiguous(), softmax_scale=q.shape[3] ** -0.5, is_causal=causal,
        )  # fmt: skip
        return dq, dk, dv
