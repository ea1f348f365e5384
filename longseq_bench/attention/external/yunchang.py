"""yunchang's LongContextAttention: Ulysses inside groups of ranks, a ring across them.

Not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

from typing import Annotated, Literal

import numpy as np
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import Positions, implementation
from longseq_bench.attention.external._library import External, Library, heads_last, split
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard


@implementation("yunchang")
class Yunchang(External):
    """`LongContextAttention` of yunchang, with flash-attn as its kernel."""

    summary = "yunchang: Ulysses and a ring of flash-attn calls (USP)"
    many_ranks = True
    on_one_rank = "fused"
    dtypes = ("bfloat16", "float16")
    copies_heads = True
    library = Library(
        "yunchang",
        "yunchang",
        "pip install yunchang flash-attn --no-build-isolation",
        oldest="0.6",
        before="0.7",
        parameters={
            "set_seq_parallel_pg": "sp_ulysses_degree sp_ring_degree rank world_size",
            "LongContextAttention": "ring_impl_type",
        },
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        ulysses: Annotated[int, "ranks of a Ulysses group; the ring has the rest"] = 1,
        order: Annotated[
            Literal["basic", "zigzag"], "tokens of a rank; zigzag balances the causal mask"
        ] = "basic",
    ) -> None:
        if ulysses < 1 or group.size % ulysses or workload.kv_heads % ulysses:
            raise WorldError(
                f"ulysses={ulysses} must divide {group.size} ranks and {workload.kv_heads} KV heads"
            )
        if order == "zigzag" and not workload.causal:
            raise UnsupportedError("order=zigzag of yunchang computes causal masks only")
        split("zigzag" if order == "zigzag" else "contiguous", workload.seq_len, group)
        self.ulysses, self.tokens = ulysses, order
        super().__init__(workload, group)

    @override
    def build_shard(self) -> Shard:
        return Shard.of_tokens(self.workload, self._positions())

    def _positions(self) -> Positions:
        """Return the tokens of this rank; neighbouring ranks are a Ulysses group."""
        rank, size, tokens = self.group.rank, self.group.size, np.arange(self.workload.seq_len)
        if self.tokens == "basic":
            return np.split(tokens, size)[rank]
        rings = size // self.ulysses
        ring, part = divmod(rank, self.ulysses)
        chunks = np.split(tokens, 2 * rings)
        both = np.concatenate([chunks[ring], chunks[2 * rings - 1 - ring]])
        return np.split(both, self.ulysses)[part]

    def prepare(self, device: str) -> None:
        """Let the library make its groups of ranks, and the module."""
        super().prepare(device)
        rings = self.group.size // self.ulysses
        self.module.set_seq_parallel_pg(self.ulysses, rings, self.group.rank, self.group.size)
        self._attention = self.module.LongContextAttention(ring_impl_type=self.tokens)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out_BNHD: Tensor = self._attention(*heads_last(q, k, v), causal=self.workload.causal)
        return out_BNHD.transpose(1, 2)
