"""Implementations that fail on a CUDA device; misbehaving.py has those for any device."""

import torch
import torch.distributed as dist
from misbehaving import OnRankOne, Sound


class IllegalAccess(Sound):
    """A kernel writes outside of every allocation."""

    def fault(self) -> None:
        from far_write import write_far_away

        write_far_away[(1,)](torch.ones(1, device="cuda"))
        torch.cuda.synchronize()


class Eats(Sound):
    """The caching allocator reaches its limit."""

    def fault(self) -> None:
        kept = []
        while True:
            kept.append(torch.empty(2**26, dtype=torch.uint8, device="cuda"))


class EatsUncached(Sound):
    """cudaMalloc itself fails: torch raises another exception than for the caching allocator."""

    def fault(self) -> None:
        torch.cuda.memory.caching_allocator_enable(False)
        torch.empty(2**42, dtype=torch.uint8, device="cuda")


class RankEats(OnRankOne):
    """One rank is out of memory."""

    fault = Eats.fault


class RankWaits(OnRankOne):
    """One rank waits for what nobody sends."""

    def fault(self) -> None:
        dist.recv(torch.empty(1, device="cuda"), src=0)
        torch.cuda.synchronize()
