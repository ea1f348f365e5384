"""Attention of all tokens, some heads at a time, between two exchanges of tokens for heads.

Only a stage of heads is held twice. Backward exchanges again rather than keep what it had.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longseq_bench.core.errors import WorldError
from longseq_bench.core.model import Workload, divisors
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.head_exchange import HeadExchange, Stage
from longseq_bench.kernels.base import AttentionKernel, Triple


class Staged:
    """An AttentionKernel: `inner` on each stage's heads.

    stages: query heads and key heads of each stage.
    """

    def __init__(
        self, exchange: HeadExchange, inner: AttentionKernel, stages: Sequence[tuple[Stage, Stage]]
    ) -> None:
        self.exchange, self.inner, self.stages = exchange, inner, stages

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out, kept = torch.empty_like(q), []
        for queries, keys in self.stages:
            there = self._there(((q, queries), (k, keys), (v, keys)))
            part, lse = self.inner.forward(there[0], there[1], there[2], keep_lse)
            del there
            self.exchange.to_tokens(part, out, queries)
            del part
            if keep_lse and lse is not None:
                kept.append(lse)
        return out, torch.cat(kept, 1) if kept else None

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        each = torch.split(lse, [queries.each for queries, _ in self.stages], 1)
        for (queries, keys), row_lse in zip(self.stages, each, strict=True):
            given = ((grad_out, queries), (q, queries), (k, keys), (v, keys), (out, queries))
            do_, q_, k_, v_, out_ = self._there(given)
            made = self.inner.backward(do_, q_, k_, v_, out_, row_lse.contiguous())
            del do_, q_, k_, v_, out_
            for part, whole, stage in zip(made, grads, (queries, keys, keys), strict=True):
                self.exchange.to_tokens(part, whole, stage)
            del made, part
        return grads

    def _there(self, given: Sequence[tuple[Tensor, Stage]]) -> list[Tensor]:
        return [self.exchange.to_heads(tensor, stage) for tensor, stage in given]


class Skipping:
    """An AttentionKernel that leaves out its inner one where a pass is timed without computing."""

    def __init__(self, inner: AttentionKernel, group: Group) -> None:
        self._inner, self._group = inner, group

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._group.computes:
            return self._inner.forward(q, k, v, keep_lse)
        return q, q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Triple:
        if self._group.computes:
            return self._inner.backward(grad_out, q, k, v, out, lse)
        return q, k, v


def stages(heads: int, kv_heads: int, ranks: int, each: int) -> list[tuple[Stage, Stage]]:
    """Stages of `each` key heads a rank (the last may have fewer), with the query heads that use
    them."""
    found, group = [], heads // kv_heads
    own = kv_heads // ranks
    for start in range(0, own, each):
        now = min(each, own - start)
        found.append((Stage(start * ranks * group, now * group), Stage(start * ranks, now)))
    return found


def check_heads(workload: Workload, ranks: int) -> None:
    """Raises WorldError where heads can't be shared evenly."""
    w = workload
    for name, heads in (("heads", w.heads), ("kv_heads", w.kv_heads)):
        if heads % ranks:
            fits = ", ".join(map(str, divisors(heads)))
            raise WorldError(f"{heads} {name} can't be split over {ranks} ranks, but over {fits}")


def exchange_bytes(exchange: HeadExchange, workload: Workload) -> int:
    """What one pass of Staged sends: forward q, k, v there and out back; backward dO, q, k, v, out
    there and dq, dk, dv back."""
    w = workload
    head = w.batch * w.head_dim * w.dtype_bytes
    queries = (4, 2) if w.train else (1, 1)
    keys = (4, 2) if w.train else (2, 0)
    sent = exchange.bytes_sent(head, w.heads, *queries)
    return sent + exchange.bytes_sent(head, w.kv_heads, *keys)
