"""torch's context_parallel: its scaled_dot_product_attention as a ring over ranks.

The ring has kernels for CUDA only. Not run on a GPU by this project yet.
Letters: B batch, H heads, N tokens, D head_dim.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library, split
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@implementation("torch-context-parallel")
class TorchContextParallel(External):
    """`torch.distributed.tensor.experimental.context_parallel` around torch's attention."""

    summary = "torch's context_parallel: a ring of scaled_dot_product_attention; forward only"
    many_ranks = True
    on_one_rank = "sdpa"
    equal_heads = True
    dtypes = ("bfloat16", "float16")
    train_reason = "a backward has to run inside the context, which ends with the call"
    library = Library(
        "torch",
        "torch.distributed.tensor.experimental._attention",
        "pip install 'torch>=2.11,<2.14'",
        oldest="2.11",
        before="2.14",
        parameters={
            "context_parallel": "mesh buffers buffer_seq_dims no_restore_buffers",
            "set_rotate_method": "rotate_method",
        },
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        rotate: Annotated[
            Literal["allgather", "alltoall"], "keys gathered at once, or passed on in a ring"
        ] = "alltoall",
    ) -> None:
        # with unequal parts torch would drop its balanced order
        self.order = split("zigzag", workload.seq_len, group)
        super().__init__(workload, group)
        self.rotate = rotate

    @classmethod
    @override
    def unavailable_reason(cls, device: str) -> str | None:
        if device == "cpu":
            return "torch's context_parallel has kernels for cuda only"
        return super().unavailable_reason(device)

    def prepare(self, device: str) -> None:
        """Make a mesh of the ranks."""
        super().prepare(device)
        self.module.set_rotate_method(self.rotate)
        self._mesh = DeviceMesh.from_group(self.group.data, device)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # it shards buffers of the whole sequence; ours are sharded, so it gets one to go by
        positions = torch.arange(self.workload.seq_len, device=q.device)
        context = self.module.context_parallel(
            self._mesh, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions}
        )
        with context:
            # looked up here: the context replaces the function in its module
            out: Tensor = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.workload.causal
            )
        return out

    @override
    def facts(self) -> dict[str, Any]:
        return super().facts() | {"layout": "head-tail order, as torch balances the causal mask"}
