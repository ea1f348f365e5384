"""What attention over block layouts shares: which kernel runs it, its pattern, its cost.

One layout serves all query heads, or each has its own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from longseq_bench.attention.base import Counts, Positions
from longseq_bench.attention.kernel_attention import KernelAttention
from longseq_bench.core.cost import Cost, attention_flops, floor_bytes
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import AttentionKernel, Triple
from longseq_bench.kernels.spans import Part, SpanAttention
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.spans import spans_of


class LayoutAttention(KernelAttention):
    """Attention over the blocks of layouts that are known before it is called."""

    asked: float | None
    """Density asked for, where one was."""

    block: int
    """Tokens a block."""

    def __init__(self, workload: Workload, group: Group, kernel: sparse_selection.Kernel) -> None:
        super().__init__(workload, group)
        self.requested_kernel = kernel
        self.kernel_name = ""
        self._built: AttentionKernel | None = None

    @property
    @abstractmethod
    def layouts(self) -> tuple[BlockLayout, ...]:
        """One, or one a query head."""

    def prepare(self, device: str) -> None:
        """Choose the kernel, and make what it needs of the layouts."""
        self.kernel_name = sparse_selection.choose(
            self.requested_kernel, device, self.workload.dtype, self.kernel_blocks
        )
        self.device = device
        self._built = self._made(self.layouts)

    def build_kernel(self) -> AttentionKernel:
        assert self._built is not None, "plan comes before a call"
        return self._built

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self._layout_of(head).multiplicity(q_positions, k_positions)

    def cost(self) -> Cost:
        return Cost(attention_flops(self.workload, self._pairs()), floor_bytes(self.workload))

    def measures(self) -> dict[str, float]:
        found = [layout.block_density for layout in self.layouts]
        asked = {} if self.asked is None else {"density_asked": self.asked}
        # a layout leaves no query with nothing
        return {**asked, "density_achieved": sum(found) / len(found), "uncovered": 0.0}

    @property
    def kernel_blocks(self) -> sparse_selection.Blocks | None:
        """What a kernel has to suit; None where it has to be one of spans."""
        w = self.workload
        return sparse_selection.Blocks(self.block, w.head_dim, w.train)

    def facts(self) -> dict[str, Any]:
        w = self.workload
        kept = sum(len(layout.indices) for layout in self.layouts)
        blocks = self.kernel_blocks
        way = "gathered" if blocks else "spans"
        facts = sparse_selection.said(
            self.kernel_name, self.device, w.dtype, self.requested_kernel, way, blocks
        )
        return {**facts, "kept_blocks": kept}

    def _layout_of(self, head: int) -> BlockLayout:
        return self.layouts[head if len(self.layouts) > 1 else 0]

    def _pairs(self) -> float:
        """Visible pairs of a head, on average."""
        return sum(layout.visible_pairs for layout in self.layouts) / len(self.layouts)

    def _made(self, layouts: tuple[BlockLayout, ...]) -> AttentionKernel:
        return build_layout_kernel(
            self.kernel_name, layouts, self.workload.heads, self.workload.causal
        )


def build_layout_kernel(
    kernel: str, layouts: tuple[BlockLayout, ...], heads: int, causal: bool
) -> AttentionKernel:
    """Attention over one layout for all query heads, or one a head, by a kernel of that name.

    Kernels are imported when they are asked for: some need libraries of their own.
    """
    if kernel == "native" or (kernel == "triton" and not sparse_selection.has_triton()):
        # without Triton it is asked for in walks alone; what is held is the same
        own = [range(heads)] if len(layouts) == 1 else [range(h, h + 1) for h in range(heads)]
        shape = (heads, layouts[0].seq_len)
        parts = [Part(spans_of(x), of) for x, of in zip(layouts, own, strict=True)]
        return SpanAttention(sparse_selection.span_kernel("native"), lambda: parts, causal, shape)
    if kernel == "triton":
        from longseq_bench.kernels.triton_blocks import TritonBlocks

        return TritonBlocks(layouts)
    if kernel == "flex":
        from longseq_bench.kernels.flex_blocks import FlexBlocks

        return FlexBlocks(layouts)
    from longseq_bench.kernels.gathered import Gathered

    if len(layouts) == 1:
        return Gathered(layouts[0])
    return PerHeadKernel([Gathered(layout) for layout in layouts])


class PerHeadKernel:
    """An AttentionKernel of one kernel a query head, one after the other."""

    def __init__(self, kernels: list[AttentionKernel]) -> None:
        self._kernels = kernels

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if keep_lse else None
        for own, kv, kernel in self._heads(q, k):
            made, made_lse = kernel.forward(q[:, own], k[:, kv], v[:, kv], keep_lse)
            out[:, own] = made
            if lse is not None and made_lse is not None:
                lse[:, own] = made_lse
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
        for own, kv, kernel in self._heads(q, k):
            of_queries = [t[:, own] for t in (out, lse)]
            made = kernel.backward(grad_out[:, own], q[:, own], k[:, kv], v[:, kv], *of_queries)
            dq[:, own] = made[0]
            dk[:, kv] += made[1]
            dv[:, kv] += made[2]
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _heads(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice, AttentionKernel]]:
        group = q.shape[1] // k.shape[1]
        return [
            (slice(h, h + 1), slice(h // group, h // group + 1), kernel)
            for h, kernel in enumerate(self._kernels)
        ]
