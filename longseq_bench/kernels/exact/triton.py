"""The Triton kernel of spans over all pairs; it merges without temporaries.

Its backward adds to the gradients of keys by atomic additions, which limits its speed, so `auto`
never takes it.
"""

from typing_extensions import override

from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.exact._cuda import capability_reason
from longseq_bench.kernels.exact._spans import OverSpans
from longseq_bench.kernels.exact.base import Use, exact_kernel
from longseq_bench.kernels.spans import SpanKernel


@exact_kernel("triton")
class Triton(OverSpans):
    """The Triton kernel of this package."""

    device = "cuda"

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use) or sparse_selection.triton_reason(
            use.device, use.dtype, use.head_dim
        )
        # as FlexAttention, which torch compiles with Triton
        return reason or capability_reason((7, 0))

    @property
    @override
    def spans(self) -> SpanKernel:
        return sparse_selection.span_kernel("triton")
