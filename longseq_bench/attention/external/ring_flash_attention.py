"""zhuzilin's ring-flash-attention: flash-attn block by block, over ranks in a ring.

Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

from typing import Annotated, Literal

from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library, heads_last, split
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

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
    on_one_rank = "fused"
    dtypes = ("bfloat16", "float16")
    copies_heads = True
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
        if order != "contiguous" and not workload.causal:
            raise UnsupportedError(f"order={order} of ring-flash-attn computes causal masks only")
        self.tokens = order
        self.order = split(order, workload.seq_len, group)
        super().__init__(workload, group)

    def prepare(self, device: str) -> None:
        """Find the function of the order."""
        super().prepare(device)
        self._attend = getattr(self.module, _FUNCTIONS[self.tokens])

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out_BNHD = self._attend(
            *heads_last(q, k, v), causal=self.workload.causal, group=self.group.data
        )
        return out_BNHD.transpose(1, 2)  # type: ignore[no-any-return]
