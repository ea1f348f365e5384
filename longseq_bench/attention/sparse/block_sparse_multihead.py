"""Block-sparse attention as a module: q, k, v and the output each pass through a matrix.

What is measured of the variant `multihead`; multihead.py has the module for use in a model.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention, Counts, Positions, implementation
from longseq_bench.attention.projections import Projected, projection_flops
from longseq_bench.attention.sparse.block_sparse import BlockSparse, PatternName
from longseq_bench.core.cost import Cost, floor_bytes
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import DType, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import sparse_selection


@implementation("block-sparse-multihead")
class BlockSparseMultihead(Attention):
    """`block-sparse` between projections.

    The matrices are (D, D), one for all heads of q, one for those of k, and so on: the contract's
    projections. Those of MultiheadBlockSparse are (Hq D, Hq D), which mix heads, and take Hq times
    the FLOPs.
    """

    summary = "block-sparse as a module: q, k, v and the output pass through a matrix each"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        pattern: Annotated[PatternName, "which blocks are kept"] = "local-window",
        sparsity: Annotated[float, "fraction of the visible blocks skipped, in [0, 1)"] = 0.9,
        block: Annotated[int, "tokens a block"] = 128,
        globals: Annotated[
            int | None, "global or sink tokens (global-local, sink-window); default 128", 0
        ] = None,
        window: Annotated[
            int | None, "tokens of the window, in place of what sparsity gives it"
        ] = None,
        seed: Annotated[int, "draw of pattern=random", 0] = 0,
        kernel: Annotated[
            sparse_selection.Kernel, "what computes it; auto: the fastest here"
        ] = "auto",
    ) -> None:
        if group.size > 1:
            raise WorldError(
                "runs on one rank; ddp spreads a batch of it, as inner=block-sparse with "
                f"projections of its own, over {group.size}"
            )
        super().__init__(workload, group)
        self.inner = BlockSparse(
            workload, group, pattern=pattern, sparsity=sparsity, block=block, globals=globals,
            window=window, seed=seed, kernel=kernel,
        )  # fmt: skip

    def prepare(self, device: str) -> None:
        w = self.workload
        self.inner.prepare(device)
        self.module = Projected(self.inner, w.head_dim, getattr(torch, w.dtype), device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.workload.train):
            out: Tensor = self.module(q, k, v)
        return out

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self.inner.multiplicity(q_positions, k_positions, head)

    def cost(self) -> Cost:
        w = self.workload
        elements = 2 * w.batch * w.seq_len * (w.heads + w.kv_heads) * w.head_dim
        flops = self.inner.cost().flops + projection_flops(elements, w.head_dim, w.train)
        return Cost(flops, floor_bytes(w))

    @property
    def coarsest_dtype(self) -> DType:
        return self.inner.coarsest_dtype

    def projections(self) -> dict[str, Tensor]:
        return dict(self.module.weights.items())

    def measures(self) -> dict[str, float]:
        return self.inner.measures()

    def facts(self) -> dict[str, Any]:
        return self.inner.facts() | {"module": "projections of q, k, v and out"}
