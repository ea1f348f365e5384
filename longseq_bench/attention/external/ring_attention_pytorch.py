"""A ring of another library. Run on a CPU by this project, not on a GPU yet.

Letters: B batch, H heads, N tokens, D head_dim.
"""

from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.core.units import divisors
from longseq_bench.distributed.group import Group


@implementation("ring-attention-pytorch")
class RingAttentionPytorch(External):
    """`ring_flash_attn` of lucidrains' ring-attention-pytorch: its version in torch operations."""

    summary = "lucidrains' ring attention in torch operations (ring_flash_attn)"
    many_ranks = True
    dtypes = ("float32",)  # its sums are float32, and it multiplies them by v without a cast
    library = Library(
        "ring-attention-pytorch",
        "ring_attention_pytorch",
        "pip install 'longseq-bench[ring-attention-pytorch]'",
        versions=("0.5.20", "0.6"),
        devices=("cpu", "cuda"),
    )

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        if workload.train and group.size > 1:
            raise UnsupportedError(
                "ring_flash_attn returns wrong gradients of k and v on several ranks in version "
                "0.5.20; use mode=forward, or one rank"
            )
        # it numbers blocks by whole ones per rank, so others would mix up causal blocks
        own = workload.seq_len // group.size
        self._bucket = max(d for d in divisors(own) if d <= 1024)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        qkv_BNHD = (t.transpose(1, 2).contiguous() for t in (_alternate(q, groups), k, v))
        blocks = {"bucket_size": self._bucket, "ring_reduce_col": self.group.size > 1}
        out: Tensor = self.module.ring_flash_attn(*qkv_BNHD, causal=self.workload.causal, **blocks)
        return _alternate(out.transpose(1, 2), q.shape[1] // groups)


def _alternate(x_BHND: Tensor, groups: int) -> Tensor:
    """Return the heads in the order of the library, which gives query head i KV head i mod Hk.

    Here query heads of one KV head are adjacent. With Hk for `groups` it is the way back.
    """
    if groups in (1, x_BHND.shape[1]):
        return x_BHND
    B, H, N, D = x_BHND.shape
    return x_BHND.reshape(B, H // groups, groups, N, D).transpose(1, 2).reshape(B, H, N, D)
