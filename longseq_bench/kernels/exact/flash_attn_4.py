"""FlashAttention-4, a package for Hopper and Blackwell GPUs, written in CuTe.

Its functions are called directly, as those of FlashAttention-3 are. They are compiled at the first
call with a new dtype, head_dim or mask.
"""

from typing import Any

from torch import Tensor
from typing_extensions import override

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.base import Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import find_capability, generation_reason
from longseq_bench.kernels.exact._flash_buffers import sum_elements
from longseq_bench.kernels.exact._package_kernel import PackageKernel, transpose
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import Use, exact_kernel

PACKAGE = Package(
    distribution="flash-attn-4",
    module="flash_attn.cute.interface",
    install="pip install flash-attn-4",
    parameters={
        "_flash_attn_fwd": "q k v softmax_scale causal return_lse",
        "_flash_attn_bwd": "q k v out dout lse softmax_scale causal",
    },
)

MAX_INDEX = 2**31 - 1
"""The largest offset that CuTe computes in 32 bits, in elements.

Kernels in CuTe have read other memory beyond it, at 2M tokens of 8 heads of 128 (MSLK#303,
flash-attention#2611).
"""


@exact_kernel("flash-attn-4")
class FlashAttn4(PackageKernel):
    """FlashAttention-4, a package for Hopper and Blackwell GPUs."""

    package = PACKAGE

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        return (
            super().unavailable_reason(use)
            or generation_reason((9, 10))
            or _head_dim_reason(use.head_dim)
        )

    @override
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        check_offsets(self.name, [q, k, v], q.numel())
        return super()._forward(q, k, v, causal, mask, keep_lse)

    @override
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        (grad_out, q, out, _), (k, v) = queries, keys
        largest = max(sum_elements(q), sum_elements(k))
        check_offsets(self.name, [q, k, v, out, grad_out], largest)
        return super()._backward(queries, keys, causal, mask)

    @override
    def _call_forward(self, **given: Any) -> Any:
        return self._module._flash_attn_fwd(**given, return_lse=True)

    @override
    def _call_backward(self, queries: Queries, keys: Pair, scale: float, causal: bool) -> Triple:
        (grad_out, q, out, lse), (k, v) = queries, keys
        dq, dk, dv, *_ = self._module._flash_attn_bwd(
            **transpose(q=q, k=k, v=v, out=out, dout=grad_out), lse=lse.contiguous(),
            softmax_scale=scale, causal=causal,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def check_offsets(kernel: str, tensors: list[Tensor], elements: int) -> None:
    """Raise KernelLimitError if a tensor has an element that 32 bits can't index.

    elements: the size of the largest tensor that the package allocates. A view counts with the
    memory between its elements.
    """
    reach = [
        1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors
    ]
    largest = max(*reach, elements)
    if largest > MAX_INDEX:
        raise KernelLimitError(
            f"{kernel}: a tensor spans {largest:,} elements; kernels written in CuTe index at most "
            f"{MAX_INDEX:,} reliably"
        )


def _head_dim_reason(head_dim: int) -> str | None:
    """Return why a Blackwell GPU can't compute this head_dim; None if it can, or on Hopper."""
    found, _ = find_capability()
    if found is None or found[0] < 10 or head_dim <= 128 or head_dim == 256:
        return None
    return (
        f"it needs a head_dim of at most 128, or 256, on compute capability {found[0]}.{found[1]}"
    )
