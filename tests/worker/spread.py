"""A simple attention over ranks, with optional faults, for tests of the worker.

It does not use the package's implementations. Every rank copies its part into a tensor of zeros,
the sum over ranks is the whole tensor, and own queries attend to it by a dense softmax.

split   contiguous   one run of tokens per rank
      striped      every p-th token
      full         keys in runs, all queries on every rank
      heads        heads split, whole sequences
      batch        rows of the batch split, in a module
      heads module, ...  in a module: matrices whose gradients are averaged over ranks
"""

import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longseq_bench.attention.base import Attention, Positions
from longseq_bench.core.cost import Cost, dense_cost
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard
from longseq_bench.distributed.token_order import even_span

LATE_S = 0.1


class Spread(Attention):
    """visible_keys: no query sees keys from this position on."""

    summary = "for tests"
    many_ranks = True

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        split: str = "contiguous",
        fault: str = "",
        visible_keys: int | None = None,
    ) -> None:
        self.split, self.fault, self.visible_keys = split.split()[0], fault, visible_keys
        self.module = split == "batch" or "module" in split
        super().__init__(workload, group)
        self.last = group.rank == group.size - 1
        self.passes = 0

    def build_shard(self) -> Shard:
        w, rank, size = self.workload, self.group.rank, self.group.size
        every = np.arange(w.seq_len)
        runs = every[slice(*even_span(w.seq_len, size, rank))]
        if self.fault == "gap" and rank == size - 1:
            runs = runs[1:]
        if self.split == "striped":
            return Shard.of_tokens(w, every[rank::size])
        if self.split == "full":
            return Shard.of_tokens(w, every, runs)
        spread = {"heads": w.heads, "batch": w.batch}.get(self.split)
        if spread is None:
            return Shard.of_tokens(w, runs)
        own_part = range(*even_span(spread, size, rank))
        whole = Shard.full(w)
        if self.split == "batch":
            return Shard(own_part, whole.heads, whole.kv_heads, every, every)
        # a key head that several ranks' query heads use is on each of them
        each = w.heads // w.kv_heads
        keys = range(own_part.start // each, (own_part.stop - 1) // each + 1)
        return Shard(whole.batch, own_part, keys, every, every)

    def prepare(self, device: str) -> None:
        if not self.module:
            return
        draw = torch.Generator().manual_seed(5)
        d, dtype = self.workload.head_dim, getattr(torch, self.workload.dtype)
        self.matrices = {
            name: torch.linalg.qr(torch.randn(d, d, generator=draw))[0].to(dtype)
            for name in ("q", "k", "v", "out")
        }
        for matrix in self.matrices.values():
            if self.workload.train:
                matrix.requires_grad_().register_post_accumulate_grad_hook(self._average)

    def _average(self, matrix: Tensor) -> None:
        assert matrix.grad is not None
        if self.fault == "parameter" and matrix is self.matrices["k"]:
            return
        matrix.grad = self.group.all_sum(matrix.grad.contiguous()) / self.group.size

    def projections(self) -> dict[str, Tensor]:
        return self.matrices if self.module else {}

    def parameter_gradients(self) -> dict[str, Tensor]:
        return {n: g * self.group.size for n, g in super().parameter_gradients().items()}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.passes += 1
        self.group.count(k, v)
        if self.fault == "late" and self.last:
            time.sleep(LATE_S)
        if self.fault == "nan gradient" and self.last:
            q = q.clone()
            q.register_hook(_with_nan)
        if self.split == "heads":
            k, v = (_Shared.apply(t, self) for t in (k, v))
        if self.module:
            q, k, v = (t @ self.matrices[n] for t, n in ((q, "q"), (k, "k"), (v, "v")))
        own, keys = self.shard.queries, self.shard.keys
        if self.split in ("contiguous", "striped", "full"):
            k, v = (_gather(t, self) for t in (k, v))
            keys = np.arange(self.workload.seq_len)
        visible = self._mask(own, keys)
        first, each = self.shard.heads.start, self.workload.heads // self.workload.kv_heads
        use = [(h + first) // each - self.shard.kv_heads.start for h in range(q.shape[1])]
        scores = q @ k[:, use].transpose(-1, -2) / math.sqrt(q.shape[-1])
        out = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ v[:, use]
        if self.module:
            out = out @ self.matrices["out"]
        return self._add_fault(out)

    def _mask(self, own: Positions, keys: Positions) -> Tensor:
        visible = torch.from_numpy(np.array(self.multiplicity(own, keys, 0)))
        if self.fault == "block diagonal":
            visible &= torch.from_numpy(np.isin(keys, self.shard.keys))
        if self.fault == "far key" and self.group.rank == 0:
            visible[:, -1] = False
        if self.fault == "future" and self.last:
            visible = torch.from_numpy(keys[None] <= own[:, None] + 1)
        return visible

    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Any:
        visible = np.array(super().multiplicity(q_positions, k_positions, head))
        return (
            visible
            if self.visible_keys is None
            else visible & (k_positions[None] < self.visible_keys)
        )

    def _add_fault(self, out: Tensor) -> Tensor:
        if self.fault == "out" and self.last:
            return out * 1.01
        if self.fault == "nan" and self.last:
            row = out.shape[2] // 3
            return torch.cat([out[:, :, :row], out[:, :, row:] * _nan_factor(out, row)], 2)
        if self.fault == "holder" and self.group.rank == 1:
            return out * 1.01
        return out

    def cost(self) -> Cost:
        whole = dense_cost(self.workload)
        return Cost(whole.flops, whole.floor_bytes, 12345)


def _nan_factor(out: Tensor, row: int) -> Tensor:
    hole = torch.ones_like(out[:, :, row:])
    hole[0, 0, 0, 0] = math.nan
    return hole


def _with_nan(gradient: Tensor) -> Tensor:
    """Return the gradient with one NaN in a row whose gradient is zero (most rows are)."""
    row = int((gradient[0, 0] == 0).all(-1).nonzero()[0])
    gradient = gradient.clone()
    gradient[0, 0, row, 0] = math.nan
    return gradient


def _gather(own: Tensor, attention: Spread) -> Tensor:
    whole: Tensor = _Gather.apply(own, attention)
    return whole


class _Gather(torch.autograd.Function):
    """Own keys (B, H, M, D) -> all (B, H, N, D); backward: the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, attention: Spread) -> Tensor:
        ctx.attention = attention
        b, h, _, d = own.shape
        whole = own.new_zeros(b, h, attention.workload.seq_len, d)
        whole[:, :, torch.from_numpy(attention.shard.keys)] = own
        return attention.group.all_sum(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        attention = ctx.attention
        grad = grad.clone(memory_format=torch.contiguous_format)
        if attention.split == "full" and attention.group.rank:
            grad.zero_()  # every rank has all queries, so only rank 0 counts
        if attention.fault == "dk" and attention.last:
            grad.zero_()
        summed = attention.group.all_sum(grad)[:, :, torch.from_numpy(attention.shard.keys)]
        if attention.fault.startswith("stray"):
            unseen = torch.from_numpy(attention.shard.keys >= (attention.visible_keys or 0))
            stray = float(attention.fault.split()[1])
            summed = torch.where(unseen[:, None], torch.full_like(summed, stray), summed)
        return summed, None


class _Shared(torch.autograd.Function):
    """Own key heads as they are; backward: the sum over the ranks that have them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, attention: Spread) -> Tensor:
        ctx.attention = attention
        return own.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        attention, heads = ctx.attention, ctx.attention.shard.kv_heads
        b, _, n, d = grad.shape
        every = grad.new_zeros(b, attention.workload.kv_heads, n, d)
        every[:, heads.start : heads.stop] = grad
        return attention.group.all_sum(every)[:, heads.start : heads.stop].contiguous(), None
