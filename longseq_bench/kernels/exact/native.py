"""The compiled CPU kernel over all pairs; it merges without temporaries."""

from functools import cache
from pathlib import Path

import torch
from typing_extensions import override

from longseq_bench.kernels import native
from longseq_bench.kernels.exact._spans import OverSpans
from longseq_bench.kernels.exact.base import Use, exact_kernel
from longseq_bench.kernels.spans import SpanKernel

_MATRIX_UNITS = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}
"""CPU flags of units that torch's kernel uses for 16-bit tensors, and the compiled one does not."""


@exact_kernel("native")
class Native(OverSpans):
    """The compiled CPU kernel of this package."""

    device = "cpu"

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        return super().unavailable_reason(use) or native.unavailable_reason(use.dtype)

    @classmethod
    @override
    def priority(cls, use: Use) -> int | None:
        return 0 if _MATRIX_UNITS.get(use.dtype) in _cpu_flags() else 10

    @property
    @override
    def spans(self) -> SpanKernel:
        return native


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(flags, "").split())
