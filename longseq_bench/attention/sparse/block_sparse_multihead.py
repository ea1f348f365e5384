"""Block-sparse attention as a module: q, k, v and the output each pass through a weight matrix.

This is the benchmark's implementation of the variant `multihead`; modules/multihead.py has the
module for use in a model.
"""

from typing import Any

from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.projections import Projected, ProjectedAttention
from longseq_bench.attention.sparse.block_sparse import (
    BlockOption,
    BlockSparse,
    GlobalsOption,
    KernelOption,
    PatternOption,
    SeedOption,
    SparsityOption,
    WindowOption,
)
from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@implementation("block-sparse-multihead")
class BlockSparseMultihead(ProjectedAttention):
    """`block-sparse` between projections.

    The weights are (D, D): one for all heads of q, one for all heads of k, and so on, as the
    contract of `Attention.projections` says. Those of MultiheadBlockSparse are (Hq D, Hq D), mix
    heads, and take Hq times the FLOPs.
    """

    summary = "block-sparse with linear projections of q, k, v and the output"

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        pattern: PatternOption = "local-window",
        sparsity: SparsityOption = 0.9,
        block: BlockOption = 128,
        globals: GlobalsOption = None,
        window: WindowOption = None,
        seed: SeedOption = 0,
        kernel: KernelOption = "auto",
    ) -> None:
        if group.size > 1:
            raise WorldError(
                f"runs on one rank, not {group.size}; to split a batch over ranks use ddp with "
                "inner=block-sparse, which has the same projections"
            )
        self.refuse_decode(workload)
        inner = BlockSparse(
            workload, group, pattern=pattern, sparsity=sparsity, block=block, globals=globals,
            window=window, seed=seed, kernel=kernel,
        )  # fmt: skip
        super().__init__(workload, group, inner)

    @classmethod
    @override
    def kept_blocks(cls, workload: Workload, **options: Any) -> int:
        return BlockSparse.kept_blocks(workload, **options)

    def prepare(self, device: str) -> None:
        """Build the layout, the kernel and the weights."""
        super().prepare(device)
        self.inner.prepare(device)
        self.module = Projected(self.inner, self.workload.head_dim, self.torch_dtype, device)
        self.weights = self.module.weights
