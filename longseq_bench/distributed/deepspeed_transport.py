"""A ring whose transfers go through `deepspeed.comm`.

Its send and receive block, so even ranks send first and odd ranks receive first. With an odd number
of ranks two even ranks are neighbours: one of them then waits longer, but not forever. No transfer
overlaps with computation.
"""

import os
from collections import defaultdict

from longseq_bench.distributed.group import Pending
from longseq_bench.distributed.kv_exchange import KVPair, RingExchange


def connect(device: str) -> None:
    """Let DeepSpeed adopt the process group of torch.distributed."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed.comm
    import deepspeed.ops

    if device == "cpu":
        # otherwise it compiles a C++ all-reduce, which a ring never calls; up to 0.19.2 an
        # operator that has no entry is an error
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    deepspeed.comm.init_distributed(
        dist_backend="gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False
    )


class DeepspeedRing(RingExchange):
    """A ring over all ranks with blocking sends and receives."""

    def send_and_receive(self, sent: KVPair, received: KVPair, hops: int = 1) -> Pending:
        """Send and receive; the transfers are done on return."""
        import deepspeed.comm

        if not self.group.traffic.communicates:
            return Pending()
        self.group.count(sum(t.nbytes for t in sent))
        size, rank = self.group.size, self.group.rank
        sends = [(deepspeed.comm.send, tensor, (rank + hops) % size) for tensor in sent]
        receives = [(deepspeed.comm.recv, tensor, (rank - hops) % size) for tensor in received]
        for call, tensor, peer in sends + receives if rank % 2 == 0 else receives + sends:
            call(tensor, peer)
        return Pending()
