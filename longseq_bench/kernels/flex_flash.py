"""FlexAttention over block layouts, with the kernels of FlashAttention-4 in place of Triton's.

torch compiles calls of the package flash-attn-4 if the option BACKEND is FLASH. On a Hopper GPU it
needs blocks of 128, on a Blackwell GPU blocks of 256.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.kernels.exact._cuda import generation_reason, half_reason
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.exact.flash_attn import FLASH_ATTN_4, check_offsets
from longseq_bench.kernels.flex_blocks import FlexBlocks
from longseq_bench.meta_mode import is_meta

NAME = "flex-flash"

_BLOCK = {9: 128, 10: 256}
"""By major number of the compute capability, the tile that has to divide a block."""


def unavailable_reason(use: Use, block: int) -> str | None:
    """Return the reason why it can't run here with this dtype, head_dim and block, or None."""
    if use.device != "cuda":
        return "FlashAttention-4 is for CUDA"
    if reason := half_reason(use, largest=128):
        return reason
    if is_meta():
        return "code compiled by torch can't run on meta tensors"
    if reason := FLASH_ATTN_4.unavailable_reason() or generation_reason(tuple(_BLOCK)):
        return reason
    major = torch.cuda.get_device_capability()[0]
    needed = _BLOCK[major]
    if block == needed or (block % needed == 0 and major > 9):
        return None
    sizes = f"{needed} tokens" if major == 9 else f"{needed} tokens or a multiple of it"
    return f"it needs blocks of {sizes} on this GPU, not {block}"


class FlexFlashBlocks(FlexBlocks):
    """An AttentionKernel as FlexBlocks, for bfloat16 and float16 on CUDA."""

    @override
    def _kernel_options(self, q: Tensor) -> dict[str, Any]:
        return {"BACKEND": "FLASH"}

    @property
    @override
    def _mask_mod(self) -> Any:
        # torch drops the tables of a mask_mod that is True everywhere by itself, and then the
        # kernel sees all pairs
        return super()._mask_mod if self.causal else always_true

    @override
    def _run(self, q: Tensor, k: Tensor, v: Tensor, train: bool, **more: Any) -> Any:
        check_offsets(NAME, [q, k, v], q.numel())
        return super()._run(q, k, v, train, **more)


def always_true(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return True for every pair, from a comparison that torch does not fold (a mask_mod)."""
    return q >= 0
