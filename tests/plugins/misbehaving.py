"""Implementations with one fault each: ways to die, and two ways to be wrong.

faulty.py has more ways to be wrong.
"""

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longseq_bench.attention.base import Attention
from longseq_bench.attention.exact.ring import Ring
from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.meta_mode import is_meta

LONG = 2048
"""The warm-up is at most 1024 tokens, so a fault at this length shows in the trial itself."""


class ForTests(Attention):
    """An attention that no report describes."""

    summary = "for tests"


class Sound(ForTests):
    """What each of them would be without its fault."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] >= LONG:
            self.fault()
        return scaled_dot_product_attention(q, k, v, is_causal=self.workload.causal)

    def fault(self) -> None:
        """What goes wrong."""


class UnlistedKernel(ForTests):
    """Calls a fused kernel that the table of workspaces lacks."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_token = [t.transpose(1, 2) for t in (q, k, v)]
        n = q.shape[2]
        call = torch.ops.aten._flash_attention_forward
        return call(*by_token, None, None, n, n, 0.0, False, False)[0].transpose(1, 2)


class KillsItself(Sound):
    def fault(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stops(Sound):
    def fault(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Exits(Sound):
    def fault(self) -> None:
        os._exit(3)


class Sleeps(Sound):
    def __init__(
        self, workload: Workload, group: Group, *, walks: Annotated[bool, "in walks too"] = False
    ) -> None:
        super().__init__(workload, group)
        self.walks = walks

    def fault(self) -> None:
        if self.walks or not is_meta():
            time.sleep(600)


class Grandchild(Sound):
    """Starts one process, in the first pass."""

    started = False

    def fault(self) -> None:
        if self.started:
            return
        self.started = True
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        subprocess.Popen(sleep, start_new_session=True)


class Eats(Sound):
    def fault(self) -> None:
        self.kept = []
        while not is_meta():
            self.kept.append(torch.ones(2**18))


class Spends(Sound):
    """Needs 32 MiB for a moment and frees them."""

    def fault(self) -> None:
        torch.ones(2**23)


class Shape(Sound):
    def fault(self) -> None:
        torch.ones(2, 3) @ torch.ones(4, 5)


class Native(Sound):
    """Dies like a kernel that does not check an allocation of 256 MiB."""

    def fault(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            try:
                torch.empty(2**26)
            except RuntimeError:
                os.kill(os.getpid(), signal.SIGSEGV)


class Segfault(Sound):
    def fault(self) -> None:
        ctypes.string_at(0)


class Limit(Sound):
    def fault(self) -> None:
        raise KernelLimitError("grid of 70000 blocks exceeds 65535")


class Refuses(Sound):
    def __init__(
        self, workload: Workload, group: Group, *, odd: Annotated[bool, "odd lengths too"] = False
    ) -> None:
        super().__init__(workload, group)
        if workload.seq_len % 2 and not odd:
            raise UnsupportedError("odd lengths need odd=true")


class OverHeads(ForTests):
    """Fault 1: attention over heads instead of tokens."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)


class BlockDiagonal(ForTests):
    """Fault 4: a "simulated ring" in which each rank sees its own keys only."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shards = zip(*(t.split(t.shape[2] // 2, 2) for t in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*s) for s in shards], 2)


class OnRankOne(Ring):
    """Sound but for rank 1, in passes that are no warm-up."""

    summary = "for tests"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.group.rank == 1 and self.workload.seq_len >= LONG * self.group.size:
            self.fault()
        return super().__call__(q, k, v)

    def fault(self) -> None:
        """What goes wrong."""


RankEats, RankExits, RankKillsItself, RankStops, RankSegfaults = (
    type(f"Rank{kind.__name__}", (OnRankOne,), {"fault": kind.fault, "__module__": __name__})
    for kind in (Eats, Exits, KillsItself, Stops, Segfault)
)


class RankRaises(OnRankOne):
    def fault(self) -> None:
        raise ValueError("rank one says no")


class RankWaits(OnRankOne):
    """Waits for what nobody sends. It makes the file that LONGSEQ_TEST_WAITS names."""

    def fault(self) -> None:
        if name := os.environ.get("LONGSEQ_TEST_WAITS"):
            open(name, "w").close()
        dist.recv(torch.empty(1), src=0, tag=99)


class RankSpins(OnRankOne):
    def fault(self) -> None:
        while True:
            pass


class RankCutsOff(OnRankOne):
    """The others lose it long before it says that it is out of memory."""

    def fault(self) -> None:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                line = socket.socket(fileno=os.dup(int(name)))
                if line.getpeername():
                    line.shutdown(socket.SHUT_RDWR)
        time.sleep(0.5)
        raise MemoryError("none left")


class RankCountsThreads(OnRankOne):
    """Fails with the number of threads."""

    def fault(self) -> None:
        raise ValueError(f"{torch.get_num_threads()} thread(s)")
