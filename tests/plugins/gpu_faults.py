"""Implementations that fail on a CUDA device; misbehaving.py has those for any device."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longseq_bench.attention.base import Attention
from longseq_bench.attention.exact.ring import Ring

LONG = 2048
"""The warm-up is at most 1024 tokens, so a fault at this length shows in the trial itself."""


class OnDevice(Attention):
    """Sound up to LONG tokens."""

    summary = "for tests"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] >= LONG:
            self.fault(q)
        return scaled_dot_product_attention(q, k, v, is_causal=self.workload.causal)

    def fault(self, q: Tensor) -> None:
        """Fail."""


class IllegalAccess(OnDevice):
    """A kernel writes outside of every allocation."""

    def fault(self, q: Tensor) -> None:
        from far_write import write_far_away

        write_far_away[(1,)](q)
        torch.cuda.synchronize()


def eat(q: Tensor) -> None:
    """Allocate on the device until it fails."""
    kept = []
    while True:
        kept.append(torch.empty(2**26, dtype=torch.uint8, device=q.device))


class Eats(OnDevice):
    """The caching allocator reaches its limit."""

    def fault(self, q: Tensor) -> None:
        eat(q)


class EatsUncached(OnDevice):
    """cudaMalloc itself fails: torch raises another exception than for the caching allocator."""

    def fault(self, q: Tensor) -> None:
        torch.cuda.memory.caching_allocator_enable(False)
        torch.empty(2**42, dtype=torch.uint8, device=q.device)


class OnRankOne(Ring):
    """Sound on all ranks but the second, and there up to LONG tokens a rank."""

    summary = "for tests"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.group.rank == 1 and self.workload.seq_len >= LONG * self.group.size:
            self.fault(q)
        return super().__call__(q, k, v)

    def fault(self, q: Tensor) -> None:
        """Fail."""


class RankEats(OnRankOne):
    """One rank is out of memory."""

    def fault(self, q: Tensor) -> None:
        eat(q)


class RankWaits(OnRankOne):
    """One rank waits for what nobody sends."""

    def fault(self, q: Tensor) -> None:
        dist.recv(torch.empty(1, device=q.device), src=0)
        torch.cuda.synchronize()
