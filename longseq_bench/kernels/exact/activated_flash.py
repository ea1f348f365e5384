"""FlashAttention-3 and 4 in place of torch's flash kernel, for CUDA (arXiv 2407.08608).

torch registers these packages behind its own operators once they are activated, for the whole
process. A trial has a process of its own.
"""

import importlib.util
from typing import ClassVar

from torch.nn import attention as torch_attention
from typing_extensions import override

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels.exact._cuda import capability_reason
from longseq_bench.kernels.exact.base import Use, exact_kernel
from longseq_bench.kernels.exact.flash import Flash
from longseq_bench.meta_mode import is_meta


class ActivatedFlash(Flash):
    """The operators of Flash, run by a package that torch activates."""

    optional = True
    implementation: ClassVar[str]
    """The name by which torch knows it."""
    module: ClassVar[str]
    install: ClassVar[str]
    capability: ClassVar[tuple[int, int]]

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        if is_meta() or torch_attention.current_flash_attention_impl() == self.implementation:
            return
        try:
            torch_attention.activate_flash_attention_impl(self.implementation)
        except (RuntimeError, ImportError, ValueError) as error:
            raise UnsupportedError(f"kernel={self.name}: {error}") from None

    @classmethod
    @override
    def unavailable_reason(cls, use: Use) -> str | None:
        reason = super().unavailable_reason(use)
        if reason or is_meta():
            return reason
        try:
            found = importlib.util.find_spec(cls.module)
        except ImportError:
            found = None
        if found is None:
            return f"the package is not installed: {cls.install}"
        return capability_reason(cls.capability)

    @classmethod
    @override
    def priority(cls, use: Use) -> int | None:
        return None


@exact_kernel("flash-attn-3")
class FlashAttn3(ActivatedFlash):
    """FlashAttention-3 for Hopper, in place of torch's flash kernel."""

    implementation, module, capability = "FA3", "flash_attn_interface", (9, 0)
    install = "build the folder hopper of github.com/Dao-AILab/flash-attention"


@exact_kernel("flash-attn-4")
class FlashAttn4(ActivatedFlash):
    """FlashAttention-4 for Hopper and Blackwell, in place of torch's flash kernel."""

    implementation, module, capability = "FA4", "flash_attn.cute", (9, 0)
    install = "pip install flash-attn-4"
