"""TransformerEngine's DotProductAttention, on one rank or with its context parallelism.

Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library, heads_last, split
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@implementation("transformer-engine")
class TransformerEngine(External):
    """`DotProductAttention` of TransformerEngine; it chooses the kernel."""

    summary = "TransformerEngine's DotProductAttention; over ranks its context parallelism"
    many_ranks = True
    dtypes = ("bfloat16", "float16")
    copies_heads = True
    library = Library(
        "transformer-engine",
        "transformer_engine.pytorch",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
        oldest="2.0",
        before="3",
        parameters={
            "DotProductAttention": "num_attention_heads kv_channels num_gqa_groups "
            "attention_dropout qkv_format attn_mask_type"
        },
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        communication: Annotated[
            Literal["p2p", "all_gather", "a2a"], "how ranks exchange (its cp_comm_type)"
        ] = "p2p",
    ) -> None:
        # each rank holds a part from the front and the matching one from the back
        self.order = split("zigzag", workload.seq_len, group)
        super().__init__(workload, group)
        self.communication = communication

    def prepare(self, device: str) -> None:
        """Build the module; over ranks with a stream for its transfers."""
        super().prepare(device)
        w = self.workload
        self._attention = self.module.DotProductAttention(
            num_attention_heads=w.heads, kv_channels=w.head_dim, num_gqa_groups=w.kv_heads,
            attention_dropout=0.0, qkv_format="bshd",
            attn_mask_type="causal" if w.causal else "no_mask",
        )  # fmt: skip
        if self.group.size > 1:
            ranks = list(self.group.ranks) or list(range(self.group.size))
            stream: Any = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
            self._attention.set_context_parallel_group(
                self.group.data, ranks, stream, self.communication
            )

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, N, D = q.shape
        out: Tensor = self._attention(*heads_last(q, k, v))
        return out.reshape(B, N, H, D).transpose(1, 2)
