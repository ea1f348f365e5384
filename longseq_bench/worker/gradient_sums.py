"""Sums over all rows that the gradients of any softmax attention keep, at the cost of reading them.

Scaling q and k the other way leaves the scores, and v enters the output linearly. So for each key
head, summed over its query heads and all tokens, with any mask and pattern:

    Σ q·dq = Σ k·dk        Σ v·dv = Σ out·dO

A row that has no gradient, or a wrong one, breaks this, whether it was sampled or not.
"""

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.group import Group
from longseq_bench.worker.inputs import Pass
from longseq_bench.worker.shard_coverage import RankShard, gather_shards, is_owner

SUM_TOLERANCE: dict[DType, float] = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 8e-3}
"""Allowed difference of two sums over the root of the sum of squares of all terms."""

MIN_TOKENS = 128
_CHUNK = 4096
_Sums = Tensor  # (2, B, Hk): sums of the terms, and of their squares


def sum_errors(attention: Attention, one: Pass) -> dict[str, float]:
    """Return the largest difference of the two sums of each equation. All ranks must call it.

    Equations whose tensors a pass has overwritten or dropped are left out. Short sequences have
    none: every row of theirs is compared, and where a row sees one key q·dq is a rounding error.
    """
    if one.grads is None or one.keep == "nothing" or attention.workload.seq_len < MIN_TOKENS:
        return {}
    (q, k, v), (dq, dk, dv) = one.inputs, one.grads
    shard, group = attention.shard, attention.group
    of_queries, of_keys = gather_shards(group, shard)
    w = attention.workload
    queries = _Summed(attention, of_queries, shard.heads, w.heads // w.kv_heads)
    keys = _Summed(attention, of_keys, shard.kv_heads, 1)
    found = {"Σ q·dq and Σ k·dk": (queries.add(q, dq), keys.add(k, dk))}
    if one.out is not None and one.grad_out is not None:
        found["Σ v·dv and Σ out·dO"] = keys.add(v, dv), queries.add(one.out, one.grad_out)
    return {name: _difference(group, *sums) for name, sums in found.items()}


class _Summed:
    """Sums products of the rows of two tensors, each row on the lowest rank that has it only.

    group: heads of the tensors for each key head.
    """

    def __init__(
        self, attention: Attention, shards: list[RankShard], heads: range, group: int
    ) -> None:
        self._attention, self._shards, self._heads = attention, shards, heads
        self._group = group

    def add(self, one: Tensor, other: Tensor) -> _Sums:
        w, rank = self._attention.workload, self._attention.group.rank
        total = torch.zeros(2, w.batch, w.kv_heads, dtype=torch.float64)
        for i, b in enumerate(self._attention.shard.batch):
            for j, head in enumerate(self._heads):
                if is_owner(self._shards, rank, b, head):
                    total[:, b, head // self._group] += _products(one[i, j], other[i, j])
        return total


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum over rows of their products (N, D), and of the squares of these."""
    total = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(one), _CHUNK):
        own = slice(start, start + _CHUNK)
        rows = (one[own].detach().double() * other[own].detach().double()).sum(-1)
        total += torch.stack([rows.sum(), rows.square().sum()]).cpu()
    return total


def _difference(group: Group, one: _Sums, other: _Sums) -> float:
    one, other = group.all_sum(one), group.all_sum(other)
    size = (one[1] + other[1]).sqrt().clamp_min(1e-30)
    return float(((one[0] - other[0]).abs() / size).nan_to_num(nan=torch.inf).max())
