"""A ring whose steps go through `deepspeed.comm`, as a port to DeepSpeed has them.

Its send and receive block, so even ranks send first and odd ranks receive first; with an odd number
of ranks two even ones are neighbours and the chain of waiting is one longer, but it ends. Nothing
is hidden behind computing.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from longseq_bench.distributed.group import Pending
from longseq_bench.distributed.kv_exchange import Pair, Ring


def unavailable_reason() -> str | None:
    """Why it can't be used here; None where it can."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed; pip install 'longseq-bench[transports]' brings it"
    return None


def connect(device: str) -> None:
    """Let DeepSpeed adopt the process group that torch.distributed has."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed.comm
    import deepspeed.ops

    if device == "cpu":
        # else it compiles an all-reduce in C++ that a ring never calls
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.comm.init_distributed(
        dist_backend="gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False
    )


class DeepspeedRing(Ring):
    """A ring over all ranks by blocking sends and receives."""

    def send(self, send: Pair, receive: Pair, hops: int = 1) -> Pending:
        import deepspeed.comm

        if not self.group.traffic.communicates:
            return Pending()
        self.group.count(*send)
        size, rank = self.group.size, self.group.rank
        calls: list[tuple[Any, Any, int]] = [
            (deepspeed.comm.send, tensor, (rank + hops) % size) for tensor in send
        ]
        taken = [(deepspeed.comm.recv, tensor, (rank - hops) % size) for tensor in receive]
        calls = calls + taken if rank % 2 == 0 else taken + calls
        for call, tensor, peer in calls:
            call(tensor, peer)
        return Pending()
