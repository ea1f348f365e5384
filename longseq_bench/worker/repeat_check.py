"""The check of timed passes: each must give the result of the checked pass, for its own inputs.

Timing needs equal work, and a result that is remembered from an earlier pass must not count. So one
thing changes sign before every pass, outside the clock: v; q and k together; the gradient of the
output. The work is the same, scores stay as they are, and the results change sign exactly:

    out: with v    dv: with grad_out    dq, dk: with v, with q and k, and with grad_out

The first gradients must also keep two sums over all rows, at the cost of reading them. Scaling q
and k the other way leaves the scores, and v enters the output linearly. So for each key head,
summed over its query heads and all tokens, with any mask and pattern:

    Σ q·dq = Σ k·dk        Σ v·dv = Σ out·dO

A row that has no gradient, or a wrong one, breaks this, whether it was sampled or not.
"""

import math
from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType
from longseq_bench.distributed.shard import RankShard, find_rows, gather_shards, is_owner
from longseq_bench.worker.check import GRADIENT_TOLERANCE, TINY, TOLERANCE
from longseq_bench.worker.inputs import Pass
from longseq_bench.worker.row_check import EveryRowCheck

SUM_TOLERANCE: dict[DType, float] = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 8e-3}
"""Allowed difference of two sums over the root of the sum of squares of all terms."""

MIN_TOKENS, _CHUNK, _KEY_ROWS = 128, 4096, 16
_SIGNS_OF = {"out": "v", "dq": "vsg", "dk": "vsg", "dv": "g"}
"""What the sign of a result depends on. v: v; s: q and k; g: grad_out."""


class RepeatCheck:
    """Compares the results of later passes with those of a first one.

    The output is compared with that of `one`, which the reference confirmed. Its gradients are zero
    in most rows, so those of the next pass are compared with later ones.

    every_row: the check of the warm-up pass.  sums: errors of the sums over all rows.
    passes: the number of passes of which every result was compared.
    """

    def __init__(self, attention: Attention, one: Pass, rows: Tensor) -> None:
        assert one.out is not None
        shard, self._attention = attention.shard, attention
        own = find_rows(shard.queries, rows)[0]
        keys = torch.arange(0, len(shard.keys), -(-len(shard.keys) // _KEY_ROWS))
        self._rows = {"out": own, "dq": own, "dk": keys, "dv": keys}
        self._changes = cycle("vs" if one.grad_out is None else "vsg")
        self._expected = {"out": _sample(one.out, own)}
        self.every_row = EveryRowCheck(attention)
        self.sums: dict[str, float] = {}
        self.passes = 0
        self.largest: dict[str, float] = {}

    def change_inputs(self, one: Pass) -> None:
        """Change the sign of one thing, and restore a q that the last pass has overwritten."""
        change = next(self._changes)
        one.signs[change] *= -1
        q, k, v = one.inputs
        with torch.no_grad():
            if one.original_q is not None:
                q.copy_(one.original_q).mul_(one.signs["s"])
            elif change == "s":
                q.neg_()
            if change == "s":
                k.neg_()
            elif change == "v":
                v.neg_()
            elif one.grad_out is not None:
                one.grad_out.neg_()

    def add(self, one: Pass) -> None:
        """Compare the results of a pass, and drop them."""
        results = dict(zip(("dq", "dk", "dv"), one.grads or (), strict=False))
        if one.out is not None:
            results["out"] = one.out
        if one.grads is not None and not self.sums:
            self.sums = sum_errors(self._attention, one)
        self.passes += results.keys() <= self._expected.keys()
        for name, result in results.items():
            sign = math.prod(one.signs[part] for part in _SIGNS_OF[name])
            sample = _sample(result, self._rows[name]) * sign
            expected = self._expected.setdefault(name, sample)
            error = _difference(sample, expected, result.shape[2])
            self.largest[name] = max(self.largest.get(name, 0.0), error)
        one.out = one.grads = None

    def over_tolerance(self, dtype: DType) -> str | None:
        """Return a sentence about a result that is not the checked one, or None."""
        for name, error in self.largest.items():
            allowed = (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[dtype]
            if not error <= allowed:
                return (
                    f"{name} of a timed pass is {error:.2g} off that of the checked pass "
                    f"(allowed {allowed:.2g})"
                )
        for name, error in self.sums.items():
            if not error <= SUM_TOLERANCE[dtype]:
                return f"{name} differ by {error:.2g} (allowed {SUM_TOLERANCE[dtype]:.2g})"
        return None


def sum_errors(attention: Attention, one: Pass) -> dict[str, float]:
    """Return the largest difference of the two sums of each equation. All ranks must call it.

    Equations whose tensors a pass has overwritten or dropped are left out. Short sequences have
    none: every row of theirs is compared, and where a row sees one key q·dq is a rounding error.
    """
    if one.grads is None or one.keep == "nothing" or attention.workload.seq_len < MIN_TOKENS:
        return {}
    (q, k, v), (dq, dk, dv) = one.inputs, one.grads
    pairs = {"Σ q·dq and Σ k·dk": ((q, dq), (k, dk))}
    if one.out is not None and one.grad_out is not None:
        pairs["Σ v·dv and Σ out·dO"] = (one.out, one.grad_out), (v, dv)
    shard, group, w = attention.shard, attention.group, attention.workload
    of_queries, of_keys = gather_shards(group, shard)
    found = {}
    for name, (queries, keys) in pairs.items():
        a = _sum_products(attention, of_queries, shard.heads, w.heads // w.kv_heads, *queries)
        b = _sum_products(attention, of_keys, shard.kv_heads, 1, *keys)
        size = (a[1] + b[1]).sqrt().clamp_min(TINY)
        found[name] = float(((a[0] - b[0]).abs() / size).nan_to_num(nan=torch.inf).max())
    return found


def _sum_products(
    attention: Attention, shards: list[RankShard], heads: range, group: int, one: Tensor,
    other: Tensor,
) -> Tensor:  # fmt: skip
    """Return the sums over all ranks' rows of their products, and of the squares, (2, B, Hk).

    Each row counts on the lowest rank that has it. group: heads of the tensors for each key head.
    """
    w, rank = attention.workload, attention.group.rank
    total = torch.zeros(2, w.batch, w.kv_heads, dtype=torch.float64)
    for i, b in enumerate(attention.shard.batch):
        for j, head in enumerate(heads):
            if is_owner(shards, rank, b, head):
                for own in _chunks(one.shape[2]):
                    rows = (one[i, j, own].detach().double() * other[i, j, own].detach()).sum(-1)
                    sums = torch.stack([rows.sum(), rows.square().sum()])
                    total[:, b, head // group] += sums.cpu()
    return attention.group.all_sum(total)


def _chunks(tokens: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, tokens, _CHUNK))


def _sample(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a tensor (B, H, N, D), and the sum of all rows, (B, H, R + 1, D)."""
    tensor = tensor.detach()
    total = torch.zeros_like(tensor[:, :, 0], dtype=torch.float64)
    for own in _chunks(tensor.shape[2]):
        total += tensor[:, :, own].sum(2, dtype=torch.float64)
    chosen = tensor[:, :, rows.to(tensor.device)].double()
    return torch.cat([chosen, total[:, :, None]], 2).cpu()


def _difference(got: Tensor, expected: Tensor, tokens: int) -> float:
    """Return the largest difference over the largest magnitude of a head's rows.

    Rounding errors of N rows add up to about √N times that of one, so their sum is divided by that.
    """
    if not torch.isfinite(got).all():
        return math.inf
    largest = expected[:, :, :-1].abs().amax((2, 3)).clamp_min(TINY)
    difference = (got - expected).abs().amax(3) / largest[..., None]
    difference[:, :, -1] /= math.sqrt(tokens)
    return float(difference.max())
