"""lucidrains' ring-attention-pytorch: exact attention block by block, over ranks in a ring.

Letters: B batch, Hq heads, Hk kv_heads, G query heads per KV head, N tokens, D head_dim.
"""

from typing import Annotated

from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library, heads_last, split
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@implementation("ring-attention-pytorch")
class RingAttentionPytorch(External):
    """`ring_flash_attn` of ring-attention-pytorch: its version in torch operations."""

    summary = "lucidrains' ring attention in torch operations (ring_flash_attn)"
    many_ranks = True
    dtypes = ("float32",)  # its sums are float32, and it multiplies them by v without a cast
    copies_heads = True
    library = Library(
        "ring-attention-pytorch",
        "ring_attention_pytorch",
        "pip install 'longseq-bench[ring-attention-pytorch]'",
        oldest="0.5.20",
        before="0.6",
        devices=("cpu", "cuda"),
        parameters={"ring_flash_attn": "q k v causal bucket_size ring_reduce_col"},
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        bucket: Annotated[int, "tokens of a block (its bucket_size)"] = 1024,
    ) -> None:
        tokens, ranks = workload.seq_len, group.size
        self.order = split("contiguous", tokens, group)
        own = tokens // ranks
        if ranks > 1 and own % min(bucket, own):
            # it numbers blocks by whole ones per rank, so causal blocks would be mixed up
            raise UnsupportedError(
                f"bucket={bucket} does not divide the {own} tokens of a rank; choose a divisor"
            )
        super().__init__(workload, group)
        if workload.train and ranks > 1:
            raise UnsupportedError(
                "ring_flash_attn returns wrong gradients of k and v on several ranks in version "
                "0.5.20; use mode=forward, or one rank"
            )
        self.bucket = bucket

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        out = self.module.ring_flash_attn(
            *heads_last(_alternate(q, groups), k, v), causal=self.workload.causal,
            bucket_size=self.bucket, ring_reduce_col=self.group.size > 1,
        )  # fmt: skip
        return _alternate(out.transpose(1, 2), q.shape[1] // groups)


def _alternate(x_BHND: Tensor, groups: int) -> Tensor:
    """Return the heads in the order of the library, which gives query head i KV head i mod Hk.

    Here query heads of one KV head are adjacent. With Hk for `groups` it is the way back.
    """
    if groups in (1, x_BHND.shape[1]):
        return x_BHND
    B, H, N, D = x_BHND.shape
    return x_BHND.reshape(B, H // groups, groups, N, D).transpose(1, 2).reshape(B, H, N, D)
