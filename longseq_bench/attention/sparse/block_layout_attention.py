"""Attention over block layouts: the choice of the kernel, the pattern and the cost.

One layout serves all query heads, or each query head has its own.
"""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from longseq_bench.attention.base import Attention, Counts, Mask, Positions
from longseq_bench.attention.masked import masked_steps
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import flex_flash, sparse_selection
from longseq_bench.kernels.base import AttentionKernel, SplitKernel
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.cache_rows import CacheRows
from longseq_bench.patterns.spans import spans_of


class LayoutAttention(Attention):
    """Attention over the blocks of `layouts`: one layout, or one per query head."""

    sees_itself = True  # in every layout a block of queries sees its own keys

    requested_density: float | None
    """Requested density; None if the options set the window instead."""

    block: int
    """Tokens of a block."""

    def __init__(self, workload: Workload, group: Group, kernel: sparse_selection.Kernel) -> None:
        super().__init__(workload, group)
        self.requested_kernel = kernel
        self.kernel_name = ""

    @property
    @abstractmethod
    def layouts(self) -> tuple[BlockLayout | CacheRows, ...]:
        """The layouts of the last call, or of all calls."""

    def prepare(self, device: str) -> None:
        """Choose the kernel."""
        super().prepare(device)
        blocks, dtype = self.kernel_blocks, self.workload.dtype
        form = "gathered" if blocks else "spans"
        self.kernel_name, self._kernel_facts = sparse_selection.choose(
            self.requested_kernel, device, dtype, form, self.workload.head_dim, blocks
        )

    @property
    def kernel_blocks(self) -> sparse_selection.Blocks | None:
        """Return what block kernels have to support; None if only span kernels can be used."""
        w = self.workload
        if w.mask is not None:
            return None  # block kernels know no mask but the causal triangle
        return sparse_selection.Blocks(self.block, w.train)

    @override
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        layout = self.layouts[head if len(self.layouts) > 1 else 0]
        return layout.multiplicity(q_positions, k_positions)

    @override
    def may_see(self, q_positions: Positions, k_positions: Positions, head: int) -> Mask:
        layout = self.layouts[head if len(self.layouts) > 1 else 0]
        return layout.may_see(q_positions, k_positions)

    @override
    def kept_pairs(self) -> float:
        return sum(layout.visible_pairs for layout in self.layouts) / len(self.layouts)

    @override
    def measures(self) -> dict[str, float]:
        achieved = sum(layout.block_density for layout in self.layouts) / len(self.layouts)
        requested = self.requested_density
        measures = {} if requested is None else {"density_asked": requested}
        # no query is uncovered: in every layout each sees its own block
        return {**measures, "density_achieved": achieved, "uncovered": 0.0}

    @property
    @override
    def comparable_kernel(self) -> str:
        if self.workload.decode:
            return "native" if self.device == "cpu" else "triton"
        if self.kernel_name == "torch":
            return sparse_selection.torch_kernel(self.kernel_use).name
        return {flex_flash.NAME: "flash-attn-4"}.get(self.kernel_name, self.kernel_name)

    @override
    def facts(self) -> dict[str, Any]:
        kept = sum(len(layout.indices) for layout in self.layouts)
        return {**self._kernel_facts, "kept_blocks": kept}


def build_layout_kernel(
    kernel: str, layouts: tuple[BlockLayout, ...], heads: int, kv_heads: int, use: Use
) -> AttentionKernel:
    """Build the kernel of this name over one layout for all query heads, or over one per head.

    Kernels are imported here, because some need libraries that may be missing.
    """
    if (mask := layouts[0].mask) is not None:
        tokens = (range(mask.tokens),)
        parts = [HeadSpans(spans_of(layouts[0]), range(heads))]
        task = SpanTask(parts, True, masked_steps(mask, tokens, tokens))
        return SpanAttention(sparse_selection.span_kernel(kernel), task, (heads, mask.tokens))
    if kernel == "native" or (kernel == "triton" and not sparse_selection.has_triton()):
        # Triton is missing in meta mode only; the native kernel needs the same memory there
        by_layout = [range(heads)] if len(layouts) == 1 else [range(h, h + 1) for h in range(heads)]
        parts = [HeadSpans(spans_of(x), of) for x, of in zip(layouts, by_layout, strict=True)]
        task, shape = SpanTask(parts, layouts[0].causal), (heads, layouts[0].seq_len)
        return SpanAttention(sparse_selection.span_kernel("native"), task, shape)
    if kernel == "triton":
        from longseq_bench.kernels.triton_blocks import TritonBlocks

        return TritonBlocks(layouts)
    if kernel == "flex":
        from longseq_bench.kernels.flex_blocks import FlexBlocks

        return FlexBlocks(layouts)
    if kernel == flex_flash.NAME:
        return flex_flash.FlexFlashBlocks(layouts)
    from longseq_bench.kernels.gathered import GatheredBlocksKernel

    exact = sparse_selection.torch_kernel(use)
    kernels = [GatheredBlocksKernel(layout, exact) for layout in layouts]
    if len(kernels) == 1:
        return kernels[0]
    kv = [h * kv_heads // heads for h in range(heads)]
    return SplitKernel(
        [(np.s_[:, h : h + 1], np.s_[:, kv[h] : kv[h] + 1], one) for h, one in enumerate(kernels)],
        torch.float32,
    )
