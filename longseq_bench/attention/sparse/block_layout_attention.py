"""Attention over block layouts: the choice of the kernel, the pattern and the cost.

One layout serves all query heads, or each query head has its own.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Attention, Counts, Positions
from longseq_bench.core.cost import Cost, attention_flops, floor_bytes
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import AttentionKernel, OutputAndLse, Triple
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.spans import spans_of


class LayoutAttention(Attention):
    """Attention over the blocks of `layouts`: one layout, or one per query head."""

    requested_density: float | None
    """Density that the options ask for; None if they set the window instead."""

    block: int
    """Tokens of a block."""

    def __init__(self, workload: Workload, group: Group, kernel: sparse_selection.Kernel) -> None:
        super().__init__(workload, group)
        self.requested_kernel = kernel
        self.kernel_name = ""

    @property
    @abstractmethod
    def layouts(self) -> tuple[BlockLayout, ...]:
        """The layouts of the last call, or of all calls."""

    def prepare(self, device: str) -> None:
        """Choose the kernel."""
        super().prepare(device)
        self.kernel_name = sparse_selection.choose(
            self.requested_kernel, device, self.workload.dtype, self.kernel_blocks
        )

    @property
    def kernel_blocks(self) -> sparse_selection.Blocks | None:
        """Return the needs of a block kernel; None if only kernels of spans can be used."""
        w = self.workload
        return sparse_selection.Blocks(self.block, w.head_dim, w.train)

    @override
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        layout = self.layouts[head if len(self.layouts) > 1 else 0]
        return layout.multiplicity(q_positions, k_positions)

    @override
    def cost(self) -> Cost:
        pairs = sum(layout.visible_pairs for layout in self.layouts) / len(self.layouts)
        return Cost(attention_flops(self.workload, pairs), floor_bytes(self.workload))

    @override
    def measures(self) -> dict[str, float]:
        achieved = sum(layout.block_density for layout in self.layouts) / len(self.layouts)
        # every query of a layout sees its own block
        asked = self.requested_density
        measures = {} if asked is None else {"density_asked": asked}
        return {**measures, "density_achieved": achieved, "uncovered": 0.0}

    @override
    def facts(self) -> dict[str, Any]:
        blocks = self.kernel_blocks
        facts = sparse_selection.describe(
            self.kernel_name,
            self.device,
            self.workload.dtype,
            self.requested_kernel,
            "gathered" if blocks else "spans",
            blocks,
        )
        return {**facts, "kept_blocks": sum(len(layout.indices) for layout in self.layouts)}


def build_layout_kernel(
    kernel: str, layouts: tuple[BlockLayout, ...], heads: int, causal: bool
) -> AttentionKernel:
    """Build the kernel of this name over one layout for all query heads, or over one per head.

    Kernels are imported here, because some need libraries that may be missing.
    """
    if kernel == "native" or (kernel == "triton" and not sparse_selection.has_triton()):
        # Triton is missing in meta mode only; the native kernel holds the same memory there
        own = [range(heads)] if len(layouts) == 1 else [range(h, h + 1) for h in range(heads)]
        shape = (heads, layouts[0].seq_len)
        parts = [HeadSpans(spans_of(x), of) for x, of in zip(layouts, own, strict=True)]
        task = SpanTask(parts, causal)
        return SpanAttention(sparse_selection.span_kernel("native"), task, shape)
    if kernel == "triton":
        from longseq_bench.kernels.triton_blocks import TritonBlocks

        return TritonBlocks(layouts)
    if kernel == "flex":
        from longseq_bench.kernels.flex_blocks import FlexBlocks

        return FlexBlocks(layouts)
    from longseq_bench.kernels.gathered import GatheredBlocksKernel

    if len(layouts) == 1:
        return GatheredBlocksKernel(layouts[0])
    return PerHeadKernel([GatheredBlocksKernel(layout) for layout in layouts])


class PerHeadKernel:
    """An AttentionKernel made of one kernel per query head."""

    def __init__(self, kernels: list[AttentionKernel]) -> None:
        self._kernels = kernels

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool) -> OutputAndLse:
        """Return the output and, if kept, the log-sum-exp."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if keep_lse else None
        for head, kv_head, kernel in self._heads(q, k):
            own = q[:, head], k[:, kv_head], v[:, kv_head]
            out[:, head], head_lse = kernel.forward(*own, keep_lse)
            if lse is not None and head_lse is not None:
                lse[:, head] = head_lse
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        """Return the gradients of q, k and v; query heads that share a key head are summed."""
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
        for head, kv_head, kernel in self._heads(q, k):
            own = grad_out[:, head], q[:, head], k[:, kv_head], v[:, kv_head]
            grads = kernel.backward(*own, out[:, head], lse[:, head])
            dq[:, head] = grads[0]
            dk[:, kv_head] += grads[1]
            dv[:, kv_head] += grads[2]
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _heads(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice, AttentionKernel]]:
        group = q.shape[1] // k.shape[1]
        return [
            (slice(h, h + 1), slice(h // group, h // group + 1), kernel)
            for h, kernel in enumerate(self._kernels)
        ]
