"""Attention over block layouts: the choice of the kernel, the pattern and the cost.

One layout serves all query heads, or each query head has its own.
"""

from abc import abstractmethod
from typing import Any

from typing_extensions import override

from longseq_bench.attention.base import Attention, Counts, Mask, Positions
from longseq_bench.attention.masked import masked_steps
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask, StepMap
from longseq_bench.kernels.torch_spans import torch_kernel
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
        self.kernel_name, self._kernel_facts = sparse_selection.choose(
            self.requested_kernel, device, dtype, self.workload.head_dim, blocks
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
            return torch_kernel(self.kernel_use).name
        return self.kernel_name

    @override
    def facts(self) -> dict[str, Any]:
        kept = sum(int(layout.row_lengths.sum()) for layout in self.layouts)
        return {**self._kernel_facts, "kept_blocks": kept}


def build_layout_kernel(
    kernel: str, layouts: tuple[BlockLayout, ...], heads: int
) -> AttentionKernel:
    """Build the kernel of this name over one layout for all query heads, or over one per head.

    Kernels are imported here, because some need libraries that may be missing.
    """
    mask, causal, steps = layouts[0].mask, layouts[0].causal, StepMap()
    if mask is not None:
        tokens = (range(mask.tokens),)
        causal, steps = True, masked_steps(mask, tokens, tokens)
    elif kernel == "triton" and sparse_selection.has_triton():
        from longseq_bench.kernels.triton_blocks import TritonBlocks

        return TritonBlocks(layouts)
    elif kernel == "flex":
        from longseq_bench.kernels.flex_blocks import FlexBlocks

        return FlexBlocks(layouts)
    # Triton is missing in meta mode only; the native kernel needs the same memory there
    spans = sparse_selection.span_kernel("native" if kernel == "triton" else kernel)
    by_layout = [range(heads)] if len(layouts) == 1 else [range(h, h + 1) for h in range(heads)]
    parts = [HeadSpans(spans_of(x), of) for x, of in zip(layouts, by_layout, strict=True)]
    return SpanAttention(spans, SpanTask(parts, causal, steps), (heads, layouts[0].seq_len))
