"""FlexAttention over block layouts, by FlashAttention-4's block-sparse kernels instead of Triton's.

torch compiles calls of the package flash-attn-4 if the option BACKEND is FLASH.
"""

from typing import Any

from torch import Tensor
from typing_extensions import override

from longseq_bench.core.errors import KernelLimitError
from longseq_bench.kernels.exact._cuda import find_capability
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.exact.flash_attn import FlashAttn4, index_reason
from longseq_bench.kernels.flex_blocks import FlexBlocks
from longseq_bench.meta_mode import is_meta

NAME = "flex-flash"
MAX_HEAD_DIM = 128

_BLOCK = {9: 128, 10: 256}
"""By major number of the compute capability, the tile that has to divide a block."""


def unavailable_reason(use: Use, block: int) -> str | None:
    """Return the reason why it can't run here with this dtype, head_dim and block, or None."""
    if reason := FlashAttn4.unavailable_reason(use):
        return reason
    if is_meta():
        return "code compiled by torch can't run on meta tensors"
    if use.head_dim > MAX_HEAD_DIM:
        return f"it needs a head_dim of at most {MAX_HEAD_DIM}"
    found, _ = find_capability()
    needed = _BLOCK[found[0] if found else 9]
    if block == needed or (block % needed == 0 and needed > 128):
        return None
    sizes = f"{needed} tokens" if needed == 128 else f"{needed} tokens or a multiple of it"
    return f"it needs blocks of {sizes} on this GPU, not {block}"


class FlexFlashBlocks(FlexBlocks):
    """An AttentionKernel as FlexBlocks, for bfloat16 and float16 on CUDA."""

    @override
    def _options(self, q: Tensor) -> dict[str, Any]:
        if reason := index_reason(q.numel()):
            raise KernelLimitError(f"{NAME}: {reason}")
        return {"BACKEND": "FLASH"}

    @override
    def _every_pair(self) -> Any:
        # torch drops the tables of a mask_mod that it knows to be True everywhere
        return always_true


def always_true(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return True for every pair, from a comparison that torch does not fold (a mask_mod)."""
    return q >= 0
