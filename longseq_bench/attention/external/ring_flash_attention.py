"""zhuzilin's ring-flash-attention: flash-attn block by block, over ranks in a ring.

Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

from typing import Annotated, Any, Literal

from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import HEADS_LAST_FACT, External, Library, heads_last
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import TokenOrder

_FUNCTIONS = {
    "contiguous": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "striped": "stripe_flash_attn_func",
}
_GIVEN = "q k v causal group"


@implementation("ring-flash-attention")
class RingFlashAttention(External):
    """The plain, zigzag and striped rings of ring-flash-attention."""

    summary = "zhuzilin's ring of flash-attn calls: contiguous, zigzag or striped"
    many_ranks = True
    dtypes = ("bfloat16", "float16")
    library = Library(
        "ring-flash-attn",
        "ring_flash_attn",
        "pip install ring-flash-attn flash-attn --no-build-isolation",
        oldest="0.1.4",
        before="0.2",
        parameters=dict.fromkeys(_FUNCTIONS.values(), _GIVEN),
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        order: Annotated[
            Literal["contiguous", "zigzag", "striped"],
            "tokens of a rank; zigzag and striped balance the causal mask, and need it",
        ] = "contiguous",
    ) -> None:
        if group.size == 1:
            raise UnsupportedError("ring-flash-attention runs on 2 or more ranks; use fused")
        parts = group.size * (2 if order == "zigzag" else 1)
        if workload.seq_len % parts:
            raise WorldError(f"{workload.seq_len} tokens can't be split evenly into {parts} parts")
        if order != "contiguous" and not workload.causal:
            raise UnsupportedError(f"order={order} of ring-flash-attn computes causal masks only")
        self.order = TokenOrder(order, workload.seq_len, group.size)
        super().__init__(workload, group)

    @override
    def build_shard(self) -> Shard:
        return Shard.of_tokens(self.workload, self.order.positions(self.group.rank))

    def prepare(self, device: str) -> None:
        """Find the function of the order."""
        super().prepare(device)
        self._attend = getattr(self.module, _FUNCTIONS[self.order.name])

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out_BNHD = self._attend(
            *heads_last(q, k, v), causal=self.workload.causal, group=self.group.data
        )
        return out_BNHD.transpose(1, 2)  # type: ignore[no-any-return]

    @override
    def facts(self) -> dict[str, Any]:
        return super().facts() | HEADS_LAST_FACT
